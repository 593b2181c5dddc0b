#include "tools/sqz_eval/indexes.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <numeric>

#include "formats/sqz_file.h"
#include "tools/common/calibration.h"
#include "tools/common/output_file.h"

namespace sqz::eval {
namespace {

// One index on its way.
struct Build {
  const View* view;
  std::string path;
  std::unique_ptr<IndexBuilder> builder;
};

Status add_layer(const LayerCapture& layer, const ModelDescription& model, int64_t tokens,
                 std::vector<Build>& builds) {
  const View* gathered = nullptr;
  std::vector<float> keys, values, attention;
  for (const Build& build : builds) {
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
  return model.runner->prefill(pass.ids, options);
}

// With the questions of the facts that were planted for it; they stand where all questions do.
Status calibrate(EvalModel& model, const Pass& pass, const std::string& path, int threads) {
  SQZ_ASSIGN_OR_RETURN(const auto index, SqzFile::open(path));
  if (!check_calibratable(*index).ok()) return {};  // a kind that has no thresholds
  CalibrationPrompts prompts;
  prompts.position = static_cast<int64_t>(pass.ids.size());
  for (size_t i = pass.views.size(); i < pass.facts.size(); ++i) {
    prompts.prompts.emplace_back();
    SQZ_RETURN_IF_ERROR(
        model.tokenizer->encode(pass.facts[i].prompt, false, prompts.prompts.back()));
  }
  const RecalibrateOptions in_place{true, threads};
  return calibrate_with_prompts(*model.runner, *index, prompts, path, in_place, [](double) {})
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

Status PassIndexes::make(EvalModel& model, const Pass& pass, const std::vector<IndexKind>& kinds,
                         const BuildOptions& build, const std::function<void(double)>& progress) {
  std::map<int, std::vector<IndexKind>> by_documents;
  for (const IndexKind& kind : kinds) by_documents[kind.documents].push_back(kind);
  double done = 0;
  for (const auto& [count, some] : by_documents) {
    SQZ_ASSIGN_OR_RETURN(const auto documents, documents_of(pass, *model.tokenizer, count));
    const double part = 1.0 / static_cast<double>(by_documents.size() * documents.size());
    for (size_t d = 0; d < documents.size(); ++d, done += part) {
      SQZ_RETURN_IF_ERROR(make_document(model, documents[d], some, d, build,
                                        [&](double of) { progress(done + part * of); }));
    }
  }
  return {};
}

Status PassIndexes::make_document(EvalModel& model, const Pass& pass,
                                  const std::vector<IndexKind>& kinds, size_t document,
                                  const BuildOptions& build,
                                  const std::function<void(double)>& progress) {
  const std::string prefix = std::filesystem::temp_directory_path() / "sqz-eval.tmp.";
  std::vector<Build> builds;
  for (size_t v = 0; v < pass.views.size(); ++v) {
    for (const IndexKind& kind : kinds) {
      const std::string path = concat(unique_name(prefix), ".", v, "-", kind.name(), ".sqz");
      files_.push_back({v, kind, document, std::ssize(pass.ids), TemporaryName(path)});
      const BuildOptions options = index_options(kind, build);
      if (kind.rows != RowKind::k16) continue;
      SQZ_ASSIGN_OR_RETURN(
          auto builder,
          IndexBuilder::create(Env::posix(), path, false, model.description(),
                               view_ids(pass, pass.views[v]), model.tokenizer->hash(), options));
      builds.push_back({&pass.views[v], path, std::move(builder)});
    }
  }
  SQZ_RETURN_IF_ERROR(dense_pass(model, pass, build, builds, progress));
  for (Build& one : builds) {
    SQZ_RETURN_IF_ERROR(one.builder->finish().status());
    one.builder.reset();
    if (pass.views.size() >= pass.facts.size()) continue;
    SQZ_RETURN_IF_ERROR(calibrate(model, pass, one.path, build.threads));
  }
  for (const File& coded : files_) {
    const bool here = coded.document == document && coded.kind.documents == kinds[0].documents;
    if (!here || coded.kind.rows == RowKind::k16) continue;
    const IndexKind whole = {coded.kind.partition, RowKind::k16, coded.kind.documents};
    SQZ_ASSIGN_OR_RETURN(const auto index,
                         SqzFile::open(file(coded.view, whole, document).name.path()));
    SQZ_RETURN_IF_ERROR(compress_index(Env::posix(), *index, {coded.kind.rows, {}},
                                       coded.name.path(), false, build.threads)
                            .status());
  }
  return {};
}

const PassIndexes::File& PassIndexes::file(size_t view, const IndexKind& kind,
                                           size_t document) const {
  return *std::find_if(files_.begin(), files_.end(), [&](const File& file) {
    return file.view == view && file.kind == kind && file.document == document;
  });
}

}  // namespace sqz::eval
