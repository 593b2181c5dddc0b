#include "tools/common/exit_codes.h"

namespace sqz {

int exit_code(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return kExitOk;
    case Code::kInvalidArgument:
      return kExitUsage;
    case Code::kNotFound:
    case Code::kCorrupt:
    case Code::kUnsupported:
    case Code::kMismatch:
    case Code::kNumeric:
      return kExitBadInput;
    case Code::kCancelled:
      return kExitInterrupted;
    case Code::kIo:
    case Code::kOutOfMemory:
    case Code::kExists:
    case Code::kInternal:
      return kExitError;
  }
  return kExitError;
}

}  // namespace sqz
