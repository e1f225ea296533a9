// Keys and values out of stored hidden states: the same products, preparation and rounding that
// made them the first time, so the same bits.
#pragma once

#include <cstdint>

#include "cache.h"
#include "engine.h"

namespace tinyloop {

// Rotations of positions [0, rows): float32 [rows, head_dim], cosines then sines.
void place_rebuild_rope(const Engine& engine, int64_t rows, float* rope);

// How a layer's heads are prepared; without queries the rows hold k and v only.
HeadPrep head_prep(const Engine& engine, const Layer& layer, bool with_queries);

// One plane of all stored tokens of `view` into plane `hot_plane` of `hot`, which begins at
// position 0. rope: of positions 0 .. view.length - 1. Uses the scratch of one chunk.
void rebuild_plane(Engine& engine, const Layer& layer, int64_t plane, const CacheView& view,
                   const KvSegment& hot, int64_t hot_plane, const float* rope);

// All planes of `depth` loops into `hot`, plane for plane.
void rebuild_all(Engine& engine, const CacheView& view, int depth, const KvSegment& hot);

// Makes the buffers of rebuilt keys hold at least `rows` tokens.
void need_rebuild_rows(Engine& engine, int64_t rows);

}  // namespace tinyloop
