#include "tools/sqz_generate/open_index.h"

namespace sqz {

// The two enums share their values: sqz.h says so of sqz_status, status.h of Code.
Status to_status(sqz_status status) {
  return status == SQZ_OK ? Status() : Status(static_cast<Code>(status), sqz_last_error());
}

Result<std::shared_ptr<const OpenIndex>> OpenIndex::open(const std::string& path,
                                                         std::optional<int> gpu) {
  std::shared_ptr<OpenIndex> out(new OpenIndex);
  SQZ_RETURN_IF_ERROR(to_status(sqz_index_open(path.c_str(), SQZ_OPEN_MMAP, &out->index_)));
  out->info_.struct_size = sizeof(out->info_);
  SQZ_RETURN_IF_ERROR(to_status(sqz_index_describe(out->index_, &out->info_)));
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path));
  out->dtype_ = file->metadata().dtype;
  out->gpu_ = gpu;
  if (gpu) {
    sqz_upload_options upload = {};
    upload.struct_size = sizeof(upload);
    upload.device_id = *gpu;
    SQZ_RETURN_IF_ERROR(to_status(sqz_index_upload(out->index_, &upload)));
  }
  return std::shared_ptr<const OpenIndex>(std::move(out));
}

OpenIndex::~OpenIndex() {
  sqz_index_close(index_);
}

}  // namespace sqz
