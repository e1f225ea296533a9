#include "rebuild.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace tinyloop {

namespace {

void rebuild_segment(Engine& engine, const Layer& layer, int64_t plane, const HiddenSegment& from,
                     const KvSegment& hot, int64_t hot_plane, const float* rope) {
  const Descriptor& d = engine.descriptor;
  Backend& backend = *engine.backend;
  const HeadShape keys_only{0, d.n_kv_heads, d.head_dim};
  const Rows hidden{engine.buffers.norm.as<uint8_t>(), d.hidden_size};
  const Rows out{engine.buffers.scratch1.as<uint8_t>(), 2 * d.kv_width()};
  for (int64_t begin = from.begin; begin < from.end; begin += engine.buffers.scratch_rows) {
    const int64_t rows = std::min(engine.buffers.scratch_rows, from.end - begin);
    backend.load_hidden(from, plane, begin, rows, d.hidden_size, hidden);
    backend.linear(hidden, rows, *layer.attention.kv, out);
    backend.prepare_heads(out, rope + begin * d.head_dim, rows, keys_only,
                          head_prep(engine, layer, false));
    backend.store_kv(out, keys_only, KvRun{0, rows, begin, hot}, hot_plane);
  }
}

}  // namespace

void place_rebuild_rope(const Engine& engine, int64_t rows, float* rope) {
  std::vector<int32_t> positions(static_cast<size_t>(rows));
  std::iota(positions.begin(), positions.end(), 0);
  engine.backend->rope(engine.weights.inv_freq.data(), engine.descriptor.head_dim, positions.data(),
                       rows, rope);
}

HeadPrep head_prep(const Engine& engine, const Layer& layer, bool with_queries) {
  const Descriptor& d = engine.descriptor;
  HeadPrep prep;
  prep.bias = layer.qkv_bias.data();
  if (prep.bias != nullptr && !with_queries) prep.bias += d.q_width();
  prep.norm = d.qk_norm;
  prep.q_norm = layer.q_norm.data();
  prep.k_norm = layer.k_norm.data();
  prep.eps = static_cast<float>(d.norm_eps);
  prep.adjacent_pairs = d.rope_style == RopeStyle::kPair;
  return prep;
}

void rebuild_plane(Engine& engine, const Layer& layer, int64_t plane, const CacheView& view,
                   const KvSegment& hot, int64_t hot_plane, const float* rope) {
  for (const HiddenSegment& from : view.hidden) {
    if (from.first_plane <= plane && plane < from.last_plane) {
      rebuild_segment(engine, layer, plane, from, hot, hot_plane, rope);
    }
  }
}

void rebuild_all(Engine& engine, const CacheView& view, int depth, const KvSegment& hot) {
  need_rebuild_rows(engine, view.length);
  const auto* rope = engine.buffers.rebuild_rope.as<float>();
  place_rebuild_rope(engine, view.length, engine.buffers.rebuild_rope.as<float>());
  const Schedule& schedule = engine.schedule;
  const auto rebuild = [&](const Step& step, int64_t plane) {
    if (step.kind != Step::Kind::kLayer) return;
    const Layer& layer = engine.weights.layers[static_cast<size_t>(step.layer)];
    rebuild_plane(engine, layer, plane, view, hot, plane, rope);
  };
  for (const Step& step : schedule.before) rebuild(step, step.plane);
  for (const Step& step : schedule.after) rebuild(step, step.plane);
  for (int loop = 0; loop < depth; ++loop) {
    for (const Step& step : schedule.loop) rebuild(step, schedule.plane(step, loop));
  }
}

void need_rebuild_rows(Engine& engine, int64_t rows) {
  if (rows <= engine.buffers.rebuild_rows) return;
  allocate_rebuild(engine.buffer_shape(), rows, *engine.account, engine.buffers);
}

}  // namespace tinyloop
