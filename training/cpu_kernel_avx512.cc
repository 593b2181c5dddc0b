#define SQZ_LANES 16
#define SQZ_ROWS 12
#define SQZ_ISA avx512
#include "training/cpu_kernel.h"
#include "training/cpu_kernel.inc"
