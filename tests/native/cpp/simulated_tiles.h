// The tile unit in plain C++, after the processor's manual: what src/cpu/tile_unit.h asks of it.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace tinyloop::cpu::TINYLOOP_ISA {

inline constexpr int kTileRows = 16, kTileWords = 16;

struct TileRegisters {
  uint32_t words[8][kTileRows][kTileWords];
  bool configured = false;
};
inline thread_local TileRegisters tile_registers;

// What the unit does before it is configured is a fault; here its tiles are then not numbers.
class TileUnit {
 public:
  TileUnit() {
    std::memset(tile_registers.words, 0, sizeof(tile_registers.words));
    tile_registers.configured = true;
  }
  ~TileUnit() {
    std::memset(tile_registers.words, 0xFF, sizeof(tile_registers.words));
    tile_registers.configured = false;
  }
};

template <int kTile>
inline void tile_zero() {
  std::memset(tile_registers.words[kTile], 0, sizeof(tile_registers.words[kTile]));
}
template <int kTile>
inline void tile_load(const void* from, int64_t row_bytes) {
  for (int row = 0; row < kTileRows; ++row) {
    std::memcpy(tile_registers.words[kTile][row],
                static_cast<const uint8_t*>(from) + row * row_bytes, 4 * kTileWords);
  }
}
template <int kTile>
inline void tile_store(void* to, int64_t row_bytes) {
  for (int row = 0; row < kTileRows; ++row) {
    std::memcpy(static_cast<uint8_t*>(to) + row * row_bytes, tile_registers.words[kTile][row],
                4 * kTileWords);
  }
}

inline float as_float(uint32_t word) {
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
// A subnormal number is zero to the unit, given or computed.
inline float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }
inline float odd_part(uint32_t word) { return flushed(as_float(word & 0xFFFF0000u)); }
inline float even_part(uint32_t word) { return flushed(as_float(word << 16)); }

template <int kC, int kA, int kB>
inline void tile_multiply() {
  auto& tiles = tile_registers.words;
  for (int m = 0; m < kTileRows; ++m) {
    float even[kTileWords] = {}, odd[kTileWords] = {};
    for (int k = 0; k < kTileWords; ++k) {
      const uint32_t a = tiles[kA][m][k];
      for (int n = 0; n < kTileWords; ++n) {
        const uint32_t b = tiles[kB][k][n];
        even[n] = flushed(std::fma(even_part(a), even_part(b), even[n]));
        odd[n] = flushed(std::fma(odd_part(a), odd_part(b), odd[n]));
      }
    }
    for (int n = 0; n < kTileWords; ++n) {
      const float sum = flushed(flushed(as_float(tiles[kC][m][n])) + flushed(even[n] + odd[n]));
      std::memcpy(&tiles[kC][m][n], &sum, 4);
    }
  }
  if (!tile_registers.configured) tile_zero<kC>();
}

}  // namespace tinyloop::cpu::TINYLOOP_ISA
