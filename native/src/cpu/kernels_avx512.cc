#define TINYLOOP_ISA avx512
#define TINYLOOP_ISA_NAME "avx512"

#include "cpu/vec_avx512.h"
// The kernels, over that Vec.
#include "cpu/kernels.inc"
