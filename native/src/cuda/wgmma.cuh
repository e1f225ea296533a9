// The machine's own instructions of sm_90a: products by warpgroups of four warps, copies that
// report to barriers in shared memory.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/mma.cuh"

// Code for other devices has none of this; what calls it must not be launched there.
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define TINYLOOP_WARPGROUPS 1
#endif

namespace tinyloop::cuda {

// ---- barriers in shared memory, and copies that report to them --------------------------------

__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
// Makes this thread's init_barrier() known to the copies that follow.
__device__ __forceinline__ void publish_barriers() {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void arrive(uint32_t barrier) {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
#endif
}
// Until the barrier's phase of this parity is over. A new barrier's phase before its first counts
// as over, with parity 1.
__device__ __forceinline__ void wait_for_phase(uint32_t barrier, uint32_t parity) {
#ifdef TINYLOOP_WARPGROUPS
  uint32_t over = 0;
  while (over == 0) {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
        "selp.b32 %0, 1, 0, p; }"
        : "=r"(over)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
#endif
}
// Whether it is, at this moment.
__device__ __forceinline__ bool is_over(uint32_t barrier, uint32_t parity) {
  uint32_t over = 0;
#ifdef TINYLOOP_WARPGROUPS
  asm volatile(
      "{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; "
      "selp.b32 %0, 1, 0, p; }"
      : "=r"(over)
      : "r"(barrier), "r"(parity)
      : "memory");
#endif
  return over != 0;
}
// An arrival; the phase is over when so many bytes have come, too.
__device__ __forceinline__ void expect_bytes(uint32_t barrier, int bytes) {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
#endif
}
// The box of a map that begins at `input` of row `row`; its bytes must be expected.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int input, int row,
                                         uint32_t barrier) {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], "
      "[%1, {%2, %3}], [%4];" ::"r"(to),
      "l"(reinterpret_cast<uint64_t>(&map)), "r"(input), "r"(row), "r"(barrier)
      : "memory");
#endif
}
// One thread's copy of a multiple of 16 bytes, which must be expected.
__device__ __forceinline__ void start_copy(uint32_t to, const void* from, int bytes,
                                           uint32_t barrier) {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
#endif
}
// The same as the barrier's one arrival of this phase.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  expect_bytes(barrier, bytes);
  start_copy(to, from, bytes, barrier);
}
// Makes this thread's stores to shared memory, and its copies that have ended, known to products.
__device__ __forceinline__ void publish_to_products() {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// 16 bytes of shared memory, or nothing: a jump would tear a run of products apart.
__device__ __forceinline__ void load_if(bool loads, uint32_t (&to)[4], uint32_t from) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %5, 0; @p ld.shared.v4.b32 {%0,%1,%2,%3}, [%4]; }"
               : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
               : "r"(from), "r"(static_cast<int>(loads))
               : "memory");
}
__device__ __forceinline__ void load_if(bool loads, uint32_t& to, uint32_t from) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %2, 0; @p ld.shared.b32 %0, [%1]; }"
               : "+r"(to)
               : "r"(from), "r"(static_cast<int>(loads))
               : "memory");
}

// Registers of this warpgroup's threads from here on, out of those that the block was given: fewer,
// or more when another warpgroup has given them up.
template <int kRegisters>
__device__ __forceinline__ void shrink_to() {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void grow_to() {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// ---- products ---------------------------------------------------------------------------------

// Where the rows lie, but for the address: in runs of 64 inputs (128 bytes) of eight rows, the 16
// bytes of row r in the order i ^ r, the next eight rows 1,024 bytes on.
inline constexpr uint64_t kSwizzledRows =
    uint64_t{1} << 62 | uint64_t{64} << 32 | uint64_t{1} << 16;

__device__ __forceinline__ uint64_t rows_at(uint64_t kind, uint32_t address) {
  return kind | (address & 0x3FFFF) >> 4;
}

__device__ __forceinline__ void begin_products() {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void commit_products() {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until at most kPending groups of products are under way.
template <int kPending>
__device__ __forceinline__ void wait_for_products() {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}

// d += a * b: 64 outputs by 16 inputs, times 16 inputs by 16, 32 or 64 rows. A warp has the
// fragment a of its 16 outputs, as multiply() takes it, and the sums of 8 rows after the other as
// multiply() gives them.
__device__ __forceinline__ void multiply_group(float (&d)[8], const uint32_t (&a)[4], uint64_t b) {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, 1, 0; "
      "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7"
      "}, {%8,%9,%10,%11}, %12, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
__device__ __forceinline__ void multiply_group(float (&d)[16], const uint32_t (&a)[4], uint64_t b) {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, 1, 0; "
      "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
      "}, {%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
__device__ __forceinline__ void multiply_group(float (&d)[32], const uint32_t (&a)[4], uint64_t b) {
#ifdef TINYLOOP_WARPGROUPS
  asm volatile(
      "{ .reg .pred p; setp.ne.b32 p, 1, 0; "
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
      "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
      "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0; }"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),
        "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),
        "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]),
        "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]),
        "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

}  // namespace tinyloop::cuda
