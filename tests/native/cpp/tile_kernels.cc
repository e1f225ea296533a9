// The kernels of the tile unit over plain C++, so that machines without the unit
// run them too.
#define TINYLOOP_ISA simulated
#define TINYLOOP_ISA_NAME "simulated amx"
#define TINYLOOP_TILES "simulated_tiles.h"

#include "cpu/vec_portable.h"
// The kernels, over that Vec.
#include "cpu/kernels.inc"
