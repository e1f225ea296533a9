// The tile unit (AMX), by instructions of our own. Each that touches memory is said to change all
// of it: a tile load reads what the compiler would otherwise be free to store later.
#pragma once

#include <cstdint>

namespace tinyloop::cpu::TINYLOOP_ISA {

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
static_assert(sizeof(TileConfig) == 64);
// A constant: the compiler's own intrinsics name 8 bytes of a configuration as read, and GCC 12 has
// left out the stores to the others of a local one.
inline constexpr TileConfig kTileConfig;

// Configures the unit of the calling thread, and releases it.
class TileUnit {
 public:
  TileUnit() { asm volatile("ldtilecfg %0" : : "m"(kTileConfig) : "memory"); }
  ~TileUnit() { asm volatile("tilerelease" : : : "memory"); }
  TileUnit(const TileUnit&) = delete;
  TileUnit& operator=(const TileUnit&) = delete;
};

template <int kTile>
inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}
template <int kTile>
inline void tile_load(const void* from, int64_t row_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2"
               :
               : "r"(from), "r"(row_bytes), "i"(kTile)
               : "memory");
}
template <int kTile>
inline void tile_store(void* to, int64_t row_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(kTile) : "memory");
}
// C += A * B; the assembler's order of operands is B, A, C.
template <int kC, int kA, int kB>
inline void tile_multiply() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace tinyloop::cpu::TINYLOOP_ISA
