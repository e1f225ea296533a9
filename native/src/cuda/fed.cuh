// The product of few rows by warpgroups (sm_90a) that are fed: some warps dequantize, one slab of a
// tile after the other, and lay the fragments into a ring in shared memory, from which a warpgroup
// takes them through registers into the tensor cores, in one chain of sums a tile. Neither waits
// for the other but for the ring. The bits are those of the narrow kernel.
//
// The packed slabs come to a ring of each feeding warp by bulk copies, the first of them before the
// kernel before this one has ended; feeding begins then, too. Up to 8 rows are formed by the block
// itself; more rows come in slabs at the word of a warp of its own. Blocks go on to other tiles
// where there are more tiles than fit the device.
#pragma once

#include "cuda/narrow.cuh"
#include "cuda/row_slabs.cuh"

namespace tinyloop::cuda {

inline constexpr int kFragmentBytes = kTileOutputs * kSlabInputs * 2;  // of a slab, dequantized
inline constexpr int kHalfSteps = 4;                                   // of half a slab
inline constexpr int kMostPackedStages = 16;

// Of a block: feeding warps, and warpgroups that multiply.
template <int kRows>
inline constexpr int kFeeders = kRows == kResidentRows ? 6 : 7;
template <int kRows>
inline constexpr int kFedGroups = kRows == kResidentRows ? 1 : 2;
template <int kRows>
inline constexpr int kFedThreads =
    32 * (kFedGroups<kRows> * kGroupWarps + kFeeders<kRows> + (kRows == kResidentRows ? 0 : 1));

struct FedArguments {
  const uint8_t* data;
  int64_t outputs, inputs, rows;
  int64_t tiles;
  int slabs;
  int active;         // tiles of a warpgroup
  int groups;         // warpgroups that multiply
  int stages;         // of a tile's ring of fragments
  int packed_stages;  // of a feeding warp's ring of packed slabs
  int row_blocks;     // of kRows each
  int items;          // (blocks of tiles) x (row blocks), row blocks fastest
  LinearInput input;
  LinearOutput output;
  CUtensorMap map;  // of the rows, where there are more than 8
};

// Where everything lies in shared memory.
template <int kRows>
struct FedLayout {
  uint32_t rows, fragments, packed;
  uint32_t packed_full;                 // barriers: [feeders][packed stages]
  uint32_t full, empty;                 // [tiles][stages]
  uint32_t rows_full, rows_empty, end;  // [row stages]

  __host__ __device__ __forceinline__ FedLayout(uint32_t begin, int64_t n_rows, int slabs,
                                                int slab_bytes, int tiles, int stages,
                                                int packed_stages) {
    rows = begin;
    fragments = rows + static_cast<uint32_t>(rows_bytes<kRows>(n_rows, slabs));
    packed = fragments + tiles * stages * kFragmentBytes;
    packed_full = packed + kFeeders<kRows> * packed_stages * slab_bytes;
    full = packed_full + kFeeders<kRows> * packed_stages * 8;
    empty = full + tiles * stages * 8;
    rows_full = empty + tiles * stages * 8;
    rows_empty = rows_full + (kRows > kResidentRows ? kRowStages<kRows> * 8 : 0);
    end = rows_empty + (kRows > kResidentRows ? kRowStages<kRows> * 8 : 0);
  }
};

// ---- feeding ----------------------------------------------------------------------------------

// A feeding warp's place among the slabs of the block, in which its feeders take turns: slab by
// slab, in each the tiles.
template <int kFeeders, int kBytes>
struct FedCursor {
  const FedArguments& args;
  int tiles;  // of an item
  int item, slab, tile, stage;
  uint32_t phase;  // of the ring of fragments
  int first_tile;  // of the item

  // The block's `unit`th.
  __device__ __forceinline__ FedCursor(const FedArguments& args, int unit)
      : args(args), tiles(args.groups * args.active) {
    const int ordinal = unit / tiles;
    tile = unit % tiles;
    item = static_cast<int>(blockIdx.x) + ordinal / args.slabs * static_cast<int>(gridDim.x);
    slab = ordinal % args.slabs;
    stage = ordinal % args.stages;
    phase = static_cast<uint32_t>(ordinal / args.stages % 2);
    begin_item();
  }
  __device__ __forceinline__ void begin_item() { first_tile = item / args.row_blocks * tiles; }
  __device__ __forceinline__ bool valid() const { return item < args.items; }
  __device__ __forceinline__ const uint8_t* source() const {
    // Beyond the last tile: the last once more, and its sums are dropped.
    const int t = min(first_tile + tile, static_cast<int>(args.tiles) - 1);
    return args.data + (static_cast<int64_t>(t) * args.slabs + slab) * kBytes;
  }
  // To this warp's next.
  __device__ __forceinline__ void advance() {
    int slabs = kFeeders / tiles;
    tile += kFeeders - slabs * tiles;
    if (tile >= tiles) {
      tile -= tiles;
      ++slabs;
    }
    stage += slabs;
    while (stage >= args.stages) {
      stage -= args.stages;
      phase ^= 1;
    }
    slab += slabs;
    if (slab < args.slabs) return;
    do {
      slab -= args.slabs;
      item += static_cast<int>(gridDim.x);
    } while (slab >= args.slabs);
    begin_item();
  }
};

__device__ __forceinline__ void store_fragment(uint32_t to, const uint32_t (&a)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(a[0]), "r"(a[1]), "r"(a[2]),
               "r"(a[3])
               : "memory");
}

template <TensorKind kKind, int kGroup, int kFeeders>
struct Feeder {
  static constexpr int kBytes = slab_bytes(kKind, kGroup == 0 ? 1 : kGroup);
  using Cursor = FedCursor<kFeeders, kBytes>;
  const FedArguments& args;
  const uint8_t* ring;         // of packed slabs
  uint32_t ring_at, barriers;  // the same as an address; a barrier each
  uint32_t fragments, full, empty;
  int feeder, lane;

  // The first slabs, a lane each. Barriers of others must not be used before a __syncthreads().
  __device__ __forceinline__ void start() const {
    if (lane < args.packed_stages) {
      init_barrier(barriers + lane * 8, 1);
      publish_barriers();
      const Cursor at(args, feeder + lane * kFeeders);
      if (at.valid()) {
        copy_bulk(ring_at + lane * kBytes, at.source(), kBytes, barriers + lane * 8);
      }
    }
    __syncwarp();
  }
  __device__ __forceinline__ void dequantize_to(const SlabRegisters<kKind, kGroup>& slab,
                                                uint32_t to) const {
    LaneConstants constants{};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if constexpr (kGroup != 0) {
        if (step * 16 % kGroup == 0) {
          constants =
              lane_constants<kKind>(slab.low[step * 16 / kGroup], slab.high[step * 16 / kGroup]);
        }
      }
      uint32_t a[4];
      unit_fragment<kKind>(slab.units[step / kUnitSteps<kKind>], step % kUnitSteps<kKind>,
                           constants, a);
      store_fragment(to + step * 512, a);
    }
  }
  // Every slab of this warp.
  __device__ __forceinline__ void feed() const {
    Cursor now(args, feeder), next(args, feeder + args.packed_stages * kFeeders);
    int stage = 0;
    uint32_t phase = 0;
#pragma unroll 1
    while (now.valid()) {
      wait_for_phase(barriers + stage * 8, phase);
      SlabRegisters<kKind, kGroup> slab;
      slab.load(ring + stage * kBytes, lane);
      const int slot = now.tile * args.stages + now.stage;
      wait_for_phase(empty + slot * 8, now.phase ^ 1);
      dequantize_to(slab, fragments + slot * kFragmentBytes + lane * 16);
      __syncwarp();  // all of the slab is taken, and its fragments are there
      if (lane == 0) {
        arrive(full + slot * 8);
        if (next.valid()) {
          copy_bulk(ring_at + stage * kBytes, next.source(), kBytes, barriers + stage * 8);
        }
      }
      now.advance();
      next.advance();
      if (++stage == args.packed_stages) {
        stage = 0;
        phase ^= 1;
      }
    }
  }
};

// ---- multiplying ------------------------------------------------------------------------------

using HalfFragments = uint32_t[kHalfSteps][4];

// A warp that multiplies. Four sets of registers take half a slab each, three halves ahead.
template <int kRows>
struct FedMultiplier {
  RowSlabs<kRows> rows;
  uint32_t ring, full, empty;  // of this warp's tile
  int stages, lane;
  bool active;
  float sums[kRows / 2];
  int take_stage = 0, give_stage = 0;
  uint32_t phase = 0;

  template <int kHalf>
  __device__ __forceinline__ void take(HalfFragments& set, bool there) {
    const bool loads = active && there;
    if (kHalf == 0 && loads) wait_for_phase(full + take_stage * 8, phase);
    const uint32_t from = ring + take_stage * kFragmentBytes + kHalf * kHalfSteps * 512 + lane * 16;
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) load_if(loads, set[i], from + i * 512);
    if (kHalf == 1 && there) {
      if (++take_stage == stages) {
        take_stage = 0;
        phase ^= 1;
      }
    }
  }
  // The products of the last slab have ended.
  __device__ __forceinline__ void give_back() {
    rows.release_last(lane);
    if (active && lane == 0) arrive(empty + give_stage * 8);
    give_stage = give_stage + 1 == stages ? 0 : give_stage + 1;
  }
  // sums += half kHalf of a slab, which is `now`; then `free` takes the half that is three on.
  template <int kHalf>
  __device__ __forceinline__ void step(int slab, int slabs, const HalfFragments& now,
                                       HalfFragments& free) {
    if (kHalf == 0) rows.wait();
    const uint64_t b = rows.at(slab);
    begin_products();
#pragma unroll
    for (int i = 0; i < kHalfSteps; ++i) {
      multiply_group(sums, now[i], rows.of_step(b, kHalf * kHalfSteps + i));
    }
    commit_products();
    wait_for_products<1>();  // those that read `free`
    if (kHalf == 0 && slab > 0) give_back();
    if (kHalf == 1) rows.advance();
    take<1 - kHalf>(free, slab + 1 + kHalf < slabs);
  }
  // The first three halves of a tile.
  __device__ __forceinline__ void first(int slabs, HalfFragments (&sets)[4]) {
    take<0>(sets[0], true);
    take<1>(sets[1], true);
    take<0>(sets[2], slabs > 1);
  }
  // All slabs of a tile, whose first halves are taken.
  __device__ __forceinline__ void chain(int slabs, HalfFragments (&sets)[4]) {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
    int slab = 0;
#pragma unroll 1
    for (; slab + 2 <= slabs; slab += 2) {
      step<0>(slab, slabs, sets[0], sets[3]);
      step<1>(slab, slabs, sets[1], sets[0]);
      step<0>(slab + 1, slabs, sets[2], sets[1]);
      step<1>(slab + 1, slabs, sets[3], sets[2]);
    }
    if (slab < slabs) {
      step<0>(slab, slabs, sets[0], sets[3]);
      step<1>(slab, slabs, sets[1], sets[0]);
    }
    wait_for_products<0>();
    // Nothing that reads the sums may go ahead of this.
#pragma unroll
    for (float& sum : sums) asm volatile("" : "+f"(sum)::"memory");
    give_back();
  }
};

// Every item of the block, by a warp that multiplies.
template <int kRows>
__device__ __forceinline__ void multiply_fed(const FedArguments& args, FedMultiplier<kRows>& m,
                                             int stream) {
  constexpr int kEarly = kRows == kResidentRows ? 4 : 1;  // what is there already, asked for early
  HalfFragments sets[4] = {};
  m.first(args.slabs, sets);
  const bool adds = args.output.kind == OutputKind::kAdd;
#pragma unroll 1
  for (int item = static_cast<int>(blockIdx.x); item < args.items;
       item += static_cast<int>(gridDim.x)) {
    const int64_t tile =
        static_cast<int64_t>(item / args.row_blocks) * args.groups * args.active + stream;
    const TileOutput to{args.output,
                        args.rows,
                        args.outputs,
                        tile * kTileOutputs + m.lane / 4,
                        static_cast<int64_t>(item % args.row_blocks) * kRows + m.lane % 4 * 2,
                        m.active};
    float before[kEarly] = {};
    if (kRows == kResidentRows && adds) {
#pragma unroll
      for (int i = 0; i < kEarly; ++i) before[i] = to.before(i);
    }
    const bool more = item + static_cast<int>(gridDim.x) < args.items;
    m.chain(args.slabs, sets);
    if (kRows == kResidentRows && more) m.first(args.slabs, sets);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) {
      if constexpr (kRows == kResidentRows) {
        to.store(i, m.sums[i], before[i]);
      } else {
        to.store(i, m.sums[i], adds ? to.before(i) : 0.0f);
      }
    }
    // More sums than that leave no registers for fragments.
    if (kRows > kResidentRows && more) m.first(args.slabs, sets);
  }
}

// Until `threads` threads have come here.
__device__ __forceinline__ void meet(int threads) {
  asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");
}

template <TensorKind kKind, int kGroup, int kRows>
__global__ void __launch_bounds__(kFedThreads<kRows>, kRows == kResidentRows ? 2 : 1)
    fed_kernel(const __grid_constant__ FedArguments args) {
#ifdef TINYLOOP_WARPGROUPS
  extern __shared__ __align__(1024) uint8_t swizzled[];  // whose order depends on the address
  using Feeds = Feeder<kKind, kGroup, kFeeders<kRows>>;
  constexpr bool kStreams = kRows > kResidentRows;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The same in all lanes, and known to be.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  const int multiplying = args.groups * kGroupWarps, tiles = args.groups * args.active;
  const int feeder = warp - multiplying;
  const uint32_t begin = shared_address(swizzled);
  const FedLayout<kRows> at(begin, args.rows, args.slabs, Feeds::kBytes, tiles, args.stages,
                            args.packed_stages);
  const bool feeds = feeder >= 0 && feeder < kFeeders<kRows>;
  const uint32_t packed = at.packed + feeder * args.packed_stages * Feeds::kBytes;
  const Feeds fed{args,         swizzled + (packed - begin),
                  packed,       at.packed_full + feeder * args.packed_stages * 8,
                  at.fragments, at.full,
                  at.empty,     feeder,
                  lane};
  if (feeds) fed.start();
  if (warp == 0) {
    for (int i = lane; i < tiles * args.stages; i += 32) {
      init_barrier(at.full + i * 8, 1);
      init_barrier(at.empty + i * 8, 1);
    }
    if (kStreams && lane < kRowStages<kRows>) {
      init_barrier(at.rows_full + lane * 8, 1);
      init_barrier(at.rows_empty + lane * 8, multiplying);
    }
    publish_barriers();
  }
  __syncthreads();
  let_next_start();

  // A gate's rows are worth every warp; others are formed while the first slabs are fed.
  const bool all_form = !kStreams && args.input.kind == InputKind::kGateUp;
  const int forming = multiplying + (all_form ? kFeeders<kRows> : 0);
  if (!feeds || all_form) {
    wait_for_previous();
    if constexpr (!kStreams) {
      form_resident(args.input, static_cast<int>(args.rows), args.inputs, args.slabs, swizzled,
                    warp, forming);
      meet(forming * 32);
    }
  }
  if (feeds) {
    fed.feed();
    wait_for_previous();
  } else if (feeder < 0) {
    const int group = warp / kGroupWarps, member = warp % kGroupWarps;
    const bool active = member < args.active;
    const int stream = group * args.active + (active ? member : 0);
    FedMultiplier<kRows> m{RowSlabs<kRows>(at.rows, args.rows, at.rows_full, at.rows_empty),
                           at.fragments + stream * args.stages * kFragmentBytes,
                           at.full + stream * args.stages * 8,
                           at.empty + stream * args.stages * 8,
                           args.stages,
                           lane,
                           active,
                           {}};
    multiply_fed(args, m, stream);
  } else if (kStreams && lane == 0) {
    bring_row_slabs<kRows>(args.map, args.items, args.row_blocks, args.slabs, at.rows, at.rows_full,
                           at.rows_empty);
  }
#else
  __trap();
#endif
}

}  // namespace tinyloop::cuda
