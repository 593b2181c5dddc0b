/* sqz.h must compile as C99 with all warnings, twice in one file, and its struct sizes are part of
 * the ABI. */
#include "sqz/sqz.h"

int sqz_header_is_c99(void);

#define EXPECT_SIZE(type, bytes) typedef char size_of_##type[sizeof(type) == (bytes) ? 1 : -1]
EXPECT_SIZE(sqz_tensor, 48);
EXPECT_SIZE(sqz_run, 8);
EXPECT_SIZE(sqz_session_options, 144);
EXPECT_SIZE(sqz_attend_args, 112);
EXPECT_SIZE(sqz_context, 16);
EXPECT_SIZE(sqz_upload_options, 32);
EXPECT_SIZE(sqz_stats, 96);
EXPECT_SIZE(sqz_index_info, 168);

int sqz_header_is_c99(void) {
  sqz_session_options options = {0};
  sqz_session* session = 0;
  options.struct_size = sizeof options;
  return sqz_session_create(0, &options, &session) == SQZ_INVALID_ARGUMENT &&
         sqz_last_error()[0] != '\0' && sqz_version()[0] != '\0' &&
         sqz_status_string(SQZ_CORRUPT)[0] != '\0';
}
