#include "libindex/capi/json.h"
#include "libindex/describe.h"
#include "libindex/recalibrate.h"
#include "libruntime/capi/handles.h"

namespace {

using sqz::Result;
using sqz::Status;
using sqz::capi::fence;
using sqz::capi::invalid;
using sqz::capi::Options;

Result<const sqz::SqzFile*> file_of(const sqz_index* index) {
  if (index == nullptr) return invalid("index: found null");
  return index->file.get();
}

}  // namespace

extern "C" {

sqz_status sqz_index_info_json(const sqz_index* index) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(const sqz::SqzFile* file, file_of(index));
    SQZ_ASSIGN_OR_RETURN(const sqz::JsonMembers fields, sqz::describe_index(*file));
    sqz::capi::set_result(fields);
    return {};
  });
}

sqz_status sqz_index_calibrate(const sqz_index* index, const int64_t* calls, int64_t count,
                               const sqz_tensor* const* queries, const char* output,
                               const char* options, const sqz_progress* progress) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(const sqz::SqzFile* file, file_of(index));
    SQZ_RETURN_IF_ERROR(sqz::check_calibratable(*file));
    if (calls == nullptr || count < 1) return invalid("calls: found none, expected at least one");
    if (queries == nullptr) return invalid("queries: found null, expected a tensor a layer");
    if (output == nullptr) return invalid("output: found null, expected a file name");
    SQZ_ASSIGN_OR_RETURN(Options in, Options::parse(options, {"source", "replace", "threads"}));
    sqz::RecordedQueries recorded;
    recorded.source = in.text("source", "recorded queries");
    const sqz::RecalibrateOptions how{in.boolean("replace", false), in.threads()};
    SQZ_RETURN_IF_ERROR(in.status());
    recorded.calls.assign(calls, calls + count);
    int64_t total = 0;
    for (const int64_t tokens : recorded.calls) {
      if (tokens < 1 || tokens > INT32_MAX || total > INT32_MAX) {
        return invalid(sqz::concat("calls: found ", tokens, ", expected 1 or more, and at most ",
                                   INT32_MAX, " together"));
      }
      total += tokens;
    }
    const sqz::IndexMetadata& metadata = file->metadata();
    const sqz::ModelDescription& m = metadata.model;
    recorded.layers.resize(static_cast<size_t>(m.layers));
    for (int64_t layer = 0; layer < m.layers; ++layer) {
      if (metadata.layers[static_cast<size_t>(layer)].dense) continue;
      const std::string name = sqz::concat("queries[", layer, "]");
      SQZ_ASSIGN_OR_RETURN(const auto tensor,
                           sqz::capi::check_tensor(queries[layer], name.c_str(),
                                                   {total, m.query_heads, m.head_dim}));
      std::vector<float>& kept = recorded.layers[static_cast<size_t>(layer)];
      const std::span<const float> floats = sqz::capi::floats_of(tensor, kept);
      if (kept.empty()) kept.assign(floats.begin(), floats.end());
    }
    SQZ_ASSIGN_OR_RETURN(const uint64_t bytes,
                         sqz::recalibrate(sqz::Env::posix(), *file, recorded, output, how,
                                          sqz::capi::teller(progress)));
    sqz::capi::set_result(
        {{"path", output}, {"bytes", bytes}, {"queries", total}, {"source", recorded.source}});
    return {};
  });
}

sqz_status sqz_index_compress(const sqz_index* index, const char* output, const char* options,
                              const sqz_progress* progress) {
  return fence([&]() -> Status {
    SQZ_ASSIGN_OR_RETURN(const sqz::SqzFile* file, file_of(index));
    if (output == nullptr) return invalid("output: found null, expected a file name");
    SQZ_ASSIGN_OR_RETURN(Options in,
                         Options::parse(options, {"rows", "layers16", "replace", "threads"}));
    const sqz::CompressOptions how = in.compress(in.choice("rows", {"q8"}));
    const bool replace = in.boolean("replace", false);
    const int threads = in.threads();
    SQZ_RETURN_IF_ERROR(in.status());
    SQZ_ASSIGN_OR_RETURN(const sqz::CompressReport report,
                         sqz::compress_index(sqz::Env::posix(), *file, how, output, replace,
                                             threads, sqz::capi::teller(progress)));
    sqz::capi::set_result({{"path", output},
                           {"bytes", report.bytes},
                           {"bytes_before", report.bytes_before},
                           {"rows", sqz::rows_name(how.rows)}});
    return {};
  });
}

}  // extern "C"
