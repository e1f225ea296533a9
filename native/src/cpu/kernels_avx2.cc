#define TINYLOOP_ISA avx2
#define TINYLOOP_ISA_NAME "avx2"

#include "cpu/vec_avx2.h"
// The kernels, over that Vec.
#include "cpu/kernels.inc"
