/* sqz_build.h must compile as C99 with all warnings. */
#include "sqz/sqz_build.h"

int sqz_build_header_is_c99(void);

int sqz_build_header_is_c99(void) {
  sqz_build* build = 0;
  return sqz_build_create(0, 0, 0, 0, 0, &build) == SQZ_INVALID_ARGUMENT && build == 0;
}
