// The product of more than 8 rows by warpgroups (sm_90a): the weight goes from its packed form
// through registers into the tensor cores. The bits are those of the narrow kernel.
//
// A warp owns the 16 outputs of a tile. Their slabs come to a ring in shared memory of its own by
// bulk copies, the first of them before the kernel before this one has ended; the warp dequantizes
// the next slab's fragments in registers while the tensor cores work on the last one's, in one
// chain of sums. The rows come in slabs at the word of a warp of its own. Blocks go on to other
// tiles where there are more tiles than fit the device, and the copies run ahead across that
// border.
#pragma once

#include "cuda/fragments.cuh"
#include "cuda/row_slabs.cuh"

namespace tinyloop::cuda {

inline constexpr int kMostStages = 32;  // of a warp's ring: a lane starts one each
inline constexpr int kMostGroups = 2;   // multiplying warpgroups of a block

struct WarpgroupArguments {
  const uint8_t* data;
  int64_t outputs, inputs, rows;
  int64_t tiles;
  int slabs;
  int active;      // warps of a multiplying warpgroup that have a tile
  int groups;      // multiplying warpgroups
  int stages;      // slabs of a warp's ring
  int row_blocks;  // of kRows each
  int items;       // (blocks of tiles) x (row blocks), row blocks fastest
  LinearOutput output;
  CUtensorMap map;  // of the rows
};

// A warp's slabs of its tile of every item of the block, one after the other.
template <int kBytes>
struct TileStream {
  const WarpgroupArguments& args;
  int64_t tile_offset;  // of this warp's tile in a block of tiles
  uint32_t ring, barriers;
  int stage = 0, done = 0, left = 0;  // left: slabs to come, this one included
  uint32_t phase = 0;
  const uint8_t* following = nullptr;  // the slab to ask for next
  int follow_item = 0, follow_slab = 0;

  __device__ __forceinline__ const uint8_t* source(int item, int slab) const {
    const int64_t block_tiles = static_cast<int64_t>(args.groups) * args.active;
    // Beyond the last tile: the last once more, and its sums are dropped.
    const int64_t tile = min(item / args.row_blocks * block_tiles + tile_offset, args.tiles - 1);
    return args.data + (tile * args.slabs + slab) * kBytes;
  }
  __device__ __forceinline__ void start(int lane, bool active) {
    const int first = static_cast<int>(blockIdx.x), step = static_cast<int>(gridDim.x);
    left = active ? ((args.items - first + step - 1) / step) * args.slabs : 0;
    if (lane < args.stages) {
      init_barrier(barriers + lane * 8, 1);
      publish_barriers();
      if (lane < left) {
        copy_bulk(ring + lane * kBytes, source(first + lane / args.slabs * step, lane % args.slabs),
                  kBytes, barriers + lane * 8);
      }
    }
    follow_item = first + args.stages / args.slabs * step;
    follow_slab = args.stages % args.slabs;
    if (follow_item < args.items) following = source(follow_item, follow_slab);
  }
  __device__ __forceinline__ uint32_t at() const { return ring + stage * kBytes; }
  __device__ __forceinline__ void wait() const {
    if (left > 0) wait_for_phase(barriers + stage * 8, phase);
  }
  // This slab is on its way to registers, the one before it is there: asks for another in the place
  // of that one.
  __device__ __forceinline__ void advance(int lane) {
    __syncwarp();
    if (lane == 0 && done > 0 && left >= args.stages) {
      const int last = (stage == 0 ? args.stages : stage) - 1;
      copy_bulk(ring + last * kBytes, following, kBytes, barriers + last * 8);
    }
    if (done > 0) follow();
    ++done;
    --left;
    if (++stage == args.stages) {
      stage = 0;
      phase ^= 1;
    }
  }
  __device__ __forceinline__ void follow() {
    following += kBytes;
    if (++follow_slab < args.slabs) return;
    follow_slab = 0;
    follow_item += static_cast<int>(gridDim.x);
    if (follow_item < args.items) following = source(follow_item, 0);
  }
};

using SlabFragments = uint32_t[8][4];

// The registers change here, as far as the compiler knows.
__device__ __forceinline__ void pin(uint32_t (&r)[4]) {
  asm volatile("" : "+r"(r[0]), "+r"(r[1]), "+r"(r[2]), "+r"(r[3])::"memory");
}
__device__ __forceinline__ void pin(uint32_t& r, uint32_t& s) {
  asm volatile("" : "+r"(r), "+r"(s)::"memory");
}

// A slab as it is stored: a lane's share.
template <TensorKind kKind, int kGroup>
struct StoredSlab {
  static constexpr int kGroups = kSlabInputs / kGroup;
  uint32_t units[kUnits<kKind>][4] = {};
  uint32_t low[kGroups] = {}, high[kGroups] = {};  // scale and zero

  __device__ __forceinline__ void load(uint32_t slab, int lane, bool active) {
#pragma unroll
    for (int i = 0; i < kUnits<kKind>; ++i) load_if(active, units[i], slab + i * 512 + lane * 16);
    const uint32_t constants = slab + constants_offset(kKind) + lane / 4 * 4;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      load_if(active, low[g], constants + g * kTileOutputs * 4);
      load_if(active, high[g], constants + g * kTileOutputs * 4 + 32);
    }
  }
  // Neither begins before what stands before it nor ends behind what stands behind it: products
  // that the compiler sees mixed with changes of their registers run one by one.
  __device__ __forceinline__ void unpack(SlabFragments& a) {
#pragma unroll
    for (int i = 0; i < kUnits<kKind>; ++i) pin(units[i]);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) pin(low[g], high[g]);
    LaneConstants constants{};
#pragma unroll
    for (int step = 0; step < 8; ++step) {
      if (step * 16 % kGroup == 0) {
        constants = lane_constants<kKind>(low[step * 16 / kGroup], high[step * 16 / kGroup]);
      }
      const uint32_t (&u)[4] = units[step / kUnitSteps<kKind>];
      unit_fragment<kKind>(make_uint4(u[0], u[1], u[2], u[3]), step % kUnitSteps<kKind>, constants,
                           a[step]);
    }
#pragma unroll
    for (int step = 0; step < 8; ++step) pin(a[step]);
  }
};
// Halves are fragments already.
template <int kGroup>
struct StoredSlab<TensorKind::kF16, kGroup> {};

// A multiplying warp.
template <TensorKind kKind, int kGroup, int kRows>
struct Multiplier {
  static constexpr int kBytes = slab_bytes(kKind, kGroup == 0 ? 1 : kGroup);
  TileStream<kBytes>& weight;
  RowSlabs<kRows> rows;
  int lane;
  bool active;
  using Stored = StoredSlab<kKind, kGroup>;
  float sums[kRows / 2];

  // The stream's next slab, as it is stored or, where it needs no more, to `a`.
  __device__ __forceinline__ void take(Stored& stored, SlabFragments& a) {
    weight.wait();
    if constexpr (kKind == TensorKind::kF16) {
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        load_if(active, a[step], weight.at() + step * 512 + lane * 16);
      }
    } else {
      stored.load(weight.at(), lane, active);
    }
    weight.advance(lane);
  }
  __device__ __forceinline__ void first(SlabFragments& a, Stored& even, Stored& odd) {
    take(even, a);
    if constexpr (kKind != TensorKind::kF16) {
      even.unpack(a);
      take(odd, a);
    }
  }
  // sums += slab `slab`, whose fragments are `now`; `next` becomes the fragments of the slab behind
  // it, which is stored in `unpacks`; `loads` takes the one behind that. Slabs beyond the stream's
  // last are not there, and not used.
  //
  // No jump stands between the end, where `next` is made, and the products of the next step: the
  // compiler would move what makes it behind the jump and in between the products.
  template <int kPending = 1>
  __device__ __forceinline__ void step(int slab, int slabs, const SlabFragments& now,
                                       SlabFragments& next, Stored& unpacks, Stored& loads) {
    const uint64_t b = rows.at_stage();
    begin_products();
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      multiply_group(sums, now[i], rows.of_step(b, i));
    }
    commit_products();
    wait_for_products<kPending>();  // those that read `next`
    if (slab > 0) rows.release_last(lane);
    rows.advance();
    take(loads, next);
    if (slab + 1 < slabs) rows.wait();
    if constexpr (kKind != TensorKind::kF16) unpacks.unpack(next);
  }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (float& sum : sums) sum = 0.0f;
  }
  // All slabs of a tile; `a` holds the first one's fragments and `odd` the second as it is stored,
  // and afterwards those of the next tile.
  __device__ __forceinline__ void chain(int slabs, SlabFragments& a, SlabFragments& b, Stored& even,
                                        Stored& odd) {
    rows.wait();
    int slab = 0;
#pragma unroll 1
    for (; slab + 2 <= slabs; slab += 2) {
      step(slab, slabs, a, b, odd, even);
      step(slab + 1, slabs, b, a, even, odd);
    }
    if (slab < slabs) {  // to the same registers, so that the next tile begins alike
      step<0>(slab, slabs, a, a, odd, even);
      odd = even;
    }
    wait_for_products<0>();
    rows.release_last(lane);
  }
};

// Every item of the block, by a warp.
template <TensorKind kKind, int kGroup, int kRows>
__device__ __forceinline__ void multiply_items(const WarpgroupArguments& args,
                                               Multiplier<kKind, kGroup, kRows>& m, int stream) {
  StoredSlab<kKind, kGroup> even, odd;
  SlabFragments a = {}, b = {};
  m.first(a, even, odd);
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
    m.clear();
    m.chain(args.slabs, a, b, even, odd);
#pragma unroll
    for (int i = 0; i < kRows / 2; ++i) to.store(i, m.sums[i], adds ? to.before(i) : 0.0f);
  }
}

template <TensorKind kKind, int kGroup, int kRows>
__global__ void __launch_bounds__(kMostGroups * kGroupWarps * 32 + 32, 1)
    warpgroup_kernel(const __grid_constant__ WarpgroupArguments args) {
#ifdef TINYLOOP_WARPGROUPS
  extern __shared__ __align__(1024) uint8_t swizzled[];  // whose order depends on the address
  using Multiplies = Multiplier<kKind, kGroup, kRows>;
  constexpr int kStages = kRowStages<kRows>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  // The same in all lanes, and known to be.
  const int warp = __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x) / 32, 0);
  const int group = warp / kGroupWarps, member = warp % kGroupWarps;
  const bool multiplies = group < args.groups;
  const bool active = multiplies && member < args.active;
  const int streams = args.groups * args.active, stream = group * args.active + member;
  const uint32_t rows_to = shared_address(swizzled);
  const uint32_t rings = rows_to + kRowsBytes<kRows>;
  const uint32_t ring_bytes = args.stages * Multiplies::kBytes;
  const uint32_t barriers = rings + streams * ring_bytes;
  const uint32_t full = barriers + streams * args.stages * 8, empty = full + kStages * 8;

  // A warp without a tile has no ring, and never waits for one.
  TileStream<Multiplies::kBytes> weight{args, stream, active ? rings + stream * ring_bytes : rings,
                                        active ? barriers + stream * args.stages * 8 : barriers};
  if (active) weight.start(lane, true);
  if (!multiplies && lane < kStages) {
    init_barrier(full + lane * 8, 1);
    init_barrier(empty + lane * 8, args.groups * kGroupWarps);
    publish_barriers();
  }
  let_next_start();
  wait_for_previous();
  __syncthreads();
  if (multiplies) {
    Multiplies m{weight, RowSlabs<kRows>(rows_to, full, empty), lane, active, {}};
    multiply_items(args, m, stream);
  } else if (lane == 0) {
    bring_row_slabs<kRows>(args.map, args.items, args.row_blocks, args.slabs, rows_to, full, empty);
  }
#else
  __trap();
#endif
}

}  // namespace tinyloop::cuda
