#include "tools/sqz_generate/open_index.h"

namespace sqz {

// The two enums share their values: sqz.h says so of sqz_status, status.h of Code.
Status to_status(sqz_status status) {
  return status == SQZ_OK ? Status() : Status(static_cast<Code>(status), sqz_last_error());
}

Result<std::shared_ptr<OpenIndex>> OpenIndex::open(const std::string& path) {
  std::shared_ptr<OpenIndex> out(new OpenIndex);
  SQZ_RETURN_IF_ERROR(to_status(sqz_index_open(path.c_str(), SQZ_OPEN_MMAP, &out->index_)));
  out->info_.struct_size = sizeof(out->info_);
  SQZ_RETURN_IF_ERROR(to_status(sqz_index_describe(out->index_, &out->info_)));
  return out;
}

Status OpenIndex::upload(int gpu) {
  gpu_ = gpu;
  sqz_upload_options options = {};
  options.struct_size = sizeof(options);
  options.device_id = gpu;
  return to_status(sqz_index_upload(index_, &options));
}

OpenIndex::~OpenIndex() {
  sqz_index_close(index_);
}

}  // namespace sqz
