#include "formats/base/status.h"

namespace sqz {

const char* code_name(Code code) {
  switch (code) {
    case Code::kOk:
      return "ok";
    case Code::kInvalidArgument:
      return "invalid argument";
    case Code::kNotFound:
      return "not found";
    case Code::kIo:
      return "input/output error";
    case Code::kCorrupt:
      return "corrupt file";
    case Code::kUnsupported:
      return "unsupported";
    case Code::kMismatch:
      return "mismatch";
    case Code::kOutOfMemory:
      return "out of memory";
    case Code::kNumeric:
      return "not a finite number";
    case Code::kExists:
      return "already exists";
    case Code::kCancelled:
      return "cancelled";
    case Code::kInternal:
      return "internal error";
  }
  return "unknown";
}

}  // namespace sqz
