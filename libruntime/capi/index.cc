#include "libruntime/capi/fence.h"
#include "libruntime/capi/handles.h"

namespace {

using sqz::Code;
using sqz::concat;
using sqz::Status;

Status invalid(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}

}  // namespace

extern "C" {

sqz_status sqz_index_open(const char* path, sqz_open_mode mode, sqz_index** index) {
  SQZ_FENCE({
    if (index == nullptr) return invalid("index: found null, expected where to put the handle");
    *index = nullptr;
    if (path == nullptr) return invalid("path: found null, expected a file name");
    const int number = sqz::capi::enum_number(mode);
    if (number != SQZ_OPEN_MMAP && number != SQZ_OPEN_READ) {
      return invalid(concat("mode: found ", number, ", expected 0 (mmap) or 1 (read)"));
    }
    auto handle = std::make_unique<sqz_index>();
    SQZ_ASSIGN_OR_RETURN(handle->file,
                         sqz::SqzFile::open(path, number == SQZ_OPEN_READ ? sqz::OpenMode::kRead
                                                                          : sqz::OpenMode::kMmap));
    handle->fingerprint = sqz::fingerprint(handle->file->metadata().model);
    *index = handle.release();
    return {};
  })
}

void sqz_index_close(sqz_index* index) {
  delete index;
}

sqz_status sqz_index_describe(const sqz_index* index, sqz_index_info* info){SQZ_FENCE({
  if (index == nullptr) return invalid("index: found null");
  const sqz::IndexMetadata& m = index->file->metadata();
  sqz_index_info out = {};
  out.format_version = static_cast<int32_t>(sqz::kFormatVersion);
  out.tokens = m.tokens;
  out.sink = m.sink;
  out.tail = m.tail;
  out.layers = m.model.layers;
  out.query_heads = m.model.query_heads;
  out.kv_heads = m.model.kv_heads;
  out.head_dim = m.model.head_dim;
  out.levels = m.levels;
  out.attention_scale = m.model.attention_scale;
  out.file_bytes = index->file->file_bytes();
  out.has_kv = m.has_kv ? 1 : 0;
  out.partition =
      m.partition == sqz::Partition::kPages ? SQZ_PARTITION_PAGES : SQZ_PARTITION_KMEANS;
  out.page_size = m.page_size;
  out.producer = m.producer.c_str();
  out.architecture = m.model.architecture.c_str();
  out.model_fingerprint = index->fingerprint.c_str();
  out.tokenizer_hash = m.tokenizer_hash.c_str();
  out.tokens_hash = m.tokens_hash.c_str();
  return sqz::capi::write_struct(out, "info", info);
})}

sqz_status sqz_index_verify(const sqz_index* index) {
  SQZ_FENCE({
    if (index == nullptr) return invalid("index: found null");
    SQZ_ASSIGN_OR_RETURN(const sqz::VerifyReport report, index->file->verify());
    if (report.problems.empty()) return {};
    return Status(Code::kCorrupt, report.problems.front());
  })
}

}  // extern "C"
