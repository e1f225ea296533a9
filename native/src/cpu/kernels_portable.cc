#define TINYLOOP_ISA portable
#define TINYLOOP_ISA_NAME "portable"

#include "cpu/vec_portable.h"
// The kernels, over that Vec.
#include "cpu/kernels.inc"
