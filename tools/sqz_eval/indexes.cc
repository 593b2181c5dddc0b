#include "tools/sqz_eval/indexes.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>

#include "formats/base/hash.h"
#include "formats/sqz_file.h"
#include "tools/common/calibration.h"
#include "tools/common/signals.h"

namespace sqz::eval {
namespace {

constexpr const char* kTemporary = "/sqz-eval";

std::string hash_of(std::span<const int32_t> ids) {
  return hex(xxh3_64(std::as_bytes(ids)));
}

std::string file_path(const IndexStore& store, const Pass& pass, const View& view,
                      const IndexKind& kind) {
  const std::string name =
      concat(pass.ids.size(), "-", hash_of(pass.ids), "-", view.name, "-", kind.name(), ".sqz");
  if (store.keep) return store.folder + "/" + name;
  return concat(store.folder, kTemporary, ".tmp.", ::getpid(), ".", name);
}

// What an index says that it was built with: of keys that go to buckets after RoPE, a model
// without.
const ModelDescription& described(const EvalModel& model, const BuildOptions& build) {
  return build.qmodel != nullptr ? build.qmodel->model : model.description();
}

// An index that is to be reused is of this model, tokenizer and context.
Status check_reused(const std::string& path, const EvalModel& model, const Pass& pass,
                    const View& view, const BuildOptions& build) {
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path));
  const IndexMetadata& metadata = file->metadata();
  SQZ_RETURN_IF_ERROR(check_same_model(metadata.model, described(model, build), path));
  const std::string hash = hash_of(view_ids(pass, view));
  if (metadata.tokens_hash != hash) {
    return {Code::kMismatch, bad_field(path, "tokens_hash", metadata.tokens_hash, hash)};
  }
  if (metadata.partition != build.partition) {
    return {Code::kMismatch, bad_field(path, "partition", partition_name(metadata.partition),
                                       partition_name(build.partition))};
  }
  if (build.calibrate_keys && !metadata.key_calibration) {
    return {Code::kMismatch, bad_field(path, "calibration of single keys", "none",
                                       "one, for the selector ideal: pass --force to build again")};
  }
  if (build.heavy_hitters && !metadata.heavy_hitters) {
    return {Code::kMismatch, bad_field(path, "order of heavy hitters", "none",
                                       "one, for the selector h2o: pass --force to build again")};
  }
  const std::string& tokenizer = model.tokenizer().hash();
  if (metadata.tokenizer_hash != tokenizer) {
    return {Code::kMismatch, bad_field(path, "tokenizer_hash", metadata.tokenizer_hash, tokenizer)};
  }
  return {};
}

Result<bool> find_reusable(const std::string& path, const IndexStore& store, const EvalModel& model,
                           const Pass& pass, const View& view, const BuildOptions& build) {
  if (!Env::posix().exists(path)) return false;
  if (store.reuse) {
    SQZ_RETURN_IF_ERROR(check_reused(path, model, pass, view, build));
    return true;
  }
  if (!store.keep || store.force) return false;
  return Status(Code::kExists, path +
                                   ": the index is there already; pass --reuse to take it as it "
                                   "is, or --force to replace it");
}

// One index on its way.
struct Build {
  const View* view;
  std::string path;
  std::unique_ptr<IndexBuilder> builder;
};

// One that is made of another.
struct Compression {
  size_t view;
  IndexKind kind;
  std::string path;
  CompressOptions options;
};

Status add_layer(const LayerCapture& layer, const ModelDescription& model, int64_t tokens,
                 std::vector<Build>& builds) {
  const View* gathered = nullptr;
  std::vector<float> keys, values, attention;
  for (const Build& build : builds) {
    SQZ_RETURN_IF_ERROR(check_stop());
    if (build.view != gathered) {
      keys = visible_rows(layer.keys, *build.view, model.kv_heads, tokens, model.head_dim);
      values = visible_rows(layer.values, *build.view, model.kv_heads, tokens, model.head_dim);
      if (!layer.attention.empty()) {
        attention = visible_rows(layer.attention, *build.view, model.kv_heads, tokens, 1);
      }
      gathered = build.view;
    }
    SQZ_RETURN_IF_ERROR(
        build.builder->add_layer(layer.layer, {keys, values, layer.queries, nullptr, attention}));
  }
  return {};
}

Status dense_pass(EvalModel& model, const Pass& pass, const BuildOptions& build,
                  std::vector<Build>& builds, const std::function<void(double)>& progress) {
  const auto tokens = static_cast<int64_t>(pass.ids.size());
  const int64_t tail = build.tail;
  PrefillOptions options;
  options.attention = build.heavy_hitters;
  options.query_positions.resize(static_cast<size_t>(tail));
  std::iota(options.query_positions.begin(), options.query_positions.end(), tokens - tail);
  options.progress = progress;
  options.consumer = [&](const LayerCapture& layer) {
    return add_layer(layer, model.description(), tokens, builds);
  };
  return model.runner().prefill(pass.ids, options).status();
}

// With the questions of the facts that were planted for it; they stand where all questions do.
Status calibrate(EvalModel& model, const Pass& pass, const std::string& path, int threads) {
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(path));
  if (!check_calibratable(*index).ok()) return {};  // a kind that has no thresholds
  CalibrationPrompts prompts;
  prompts.position = static_cast<int64_t>(pass.ids.size());
  for (size_t i = pass.calibration; i < pass.facts.size(); ++i) {
    prompts.prompts.emplace_back();
    SQZ_RETURN_IF_ERROR(
        model.tokenizer().encode(pass.facts[i].prompt, false, prompts.prompts.back()));
  }
  const RecalibrateOptions in_place{true, threads};
  return calibrate_with_prompts(model.runner(), path, prompts, path, in_place, [](double) {})
      .status();
}

}  // namespace

std::vector<float> visible_rows(std::span<const float> all, const View& view, int64_t heads,
                                int64_t tokens, int64_t dim) {
  std::vector<float> out;
  out.reserve(all.size());
  for (int64_t head = 0; head < heads; ++head) {
    for (const Range& range : view.visible) {
      const auto begin = all.begin() + (head * tokens + range.first) * dim;
      out.insert(out.end(), begin, begin + range.count * dim);
    }
  }
  return out;
}

Result<PassIndexes> PassIndexes::make(EvalModel& model, const Pass& pass,
                                      const std::vector<IndexKind>& kinds, const IndexStore& store,
                                      const EvalBuildOptions& build,
                                      const std::function<void(double)>& progress) {
  PassIndexes out;
  out.temporary_ = !store.keep;
  std::vector<Build> builds;
  std::vector<Compression> coded;
  for (size_t v = 0; v < pass.views.size(); ++v) {
    const View& view = pass.views[v];
    for (const IndexKind& kind : kinds) {
      const std::string path = file_path(store, pass, view, kind);
      const BuildOptions options = index_options(kind, build);
      SQZ_ASSIGN_OR_RETURN(const bool present,
                           find_reusable(path, store, model, pass, view, options));
      out.files_.push_back({v, kind, path, present});
      if (present) continue;
      if (options.compress.any()) {
        coded.push_back({v, kind, path, options.compress});
        continue;
      }
      SQZ_ASSIGN_OR_RETURN(auto builder,
                           IndexBuilder::create(Env::posix(), path, store.force || out.temporary_,
                                                described(model, options), view_ids(pass, view),
                                                model.tokenizer().hash(), options));
      builds.push_back({&view, path, std::move(builder)});
    }
  }
  if (builds.empty() && coded.empty()) return out;
  out.built_ = true;
  if (!builds.empty()) SQZ_RETURN_IF_ERROR(dense_pass(model, pass, build, builds, progress));
  for (Build& one : builds) {
    SQZ_RETURN_IF_ERROR(check_stop());
    SQZ_RETURN_IF_ERROR(one.builder->finish().status());
    one.builder.reset();
    if (pass.calibration == pass.facts.size()) continue;
    SQZ_RETURN_IF_ERROR(calibrate(model, pass, one.path, build.threads));
  }
  for (const Compression& one : coded) {
    SQZ_RETURN_IF_ERROR(check_stop());
    const std::string& whole = out.path(one.view, one.kind.uncompressed());
    SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(whole));
    SQZ_RETURN_IF_ERROR(compress_index(Env::posix(), *index, one.options, one.path,
                                       store.force || out.temporary_, build.threads)
                            .status());
  }
  return out;
}

PassIndexes::~PassIndexes() {
  if (!temporary_) return;
  for (const File& file : files_) {
    // One that was never finished is not there.
    const Status ignored = Env::posix().remove(file.path);
    (void)ignored;
  }
}

const std::string& PassIndexes::path(size_t view, const IndexKind& kind) const {
  return std::find_if(files_.begin(), files_.end(),
                      [&](const File& file) { return file.view == view && file.kind == kind; })
      ->path;
}

}  // namespace sqz::eval
