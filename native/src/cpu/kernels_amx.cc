// AVX-512 with the tile unit: the bf16 mode alone.
#define TINYLOOP_ISA amx
#define TINYLOOP_ISA_NAME "amx"
#define TINYLOOP_TILES "cpu/tile_unit.h"

#include "cpu/vec_avx512.h"
// The kernels, over that Vec.
#include "cpu/kernels.inc"
