#define SQZ_LANES 8
#define SQZ_ROWS 6
#define SQZ_ISA avx2
#include "training/cpu_kernel.h"
#include "training/cpu_kernel.inc"
