#define SQZ_LANES 4
#define SQZ_ROWS 6
#define SQZ_ISA base
#include "training/cpu_kernel.h"
#include "training/cpu_kernel.inc"
