#include "libindex/layout.h"

#include <algorithm>
#include <limits>

#include "formats/base/hash.h"
#include "formats/base/parallel.h"
#include "formats/sqz_layout.h"
#include "formats/sqz_metadata.h"
#include "libindex/tree.h"

namespace sqz {
namespace {

constexpr const char* kUsualEngine = "faiss";  // is not written to the file

// Options that must fit each other. The caller has checked the ranges of single ones.
Status check_options(const BuildOptions& options) {
  const Refuse bad_option{"build options", Code::kInvalidArgument};
  const size_t levels = options.level_fractions.size();
  if (levels < 1 || levels > kMaxLevels) {
    return bad_option("levels", levels, concat("1 to ", kMaxLevels));
  }
  double above = 0;
  for (double fraction : options.level_fractions) {
    if (!(fraction > above && fraction <= 1)) {
      return bad_option("clusters per token", fraction,
                        concat("more than ", above, " (levels go from coarse to fine), at most 1"));
    }
    above = fraction;
  }
  if ((options.partition == Partition::kBuckets) != (options.qmodel != nullptr)) {
    return bad_option(
        "query classifier", options.qmodel == nullptr ? "none" : "one",
        concat("one with the partition buckets alone, found ", partition_name(options.partition)));
  }
  return Status();
}

bool is_dense(const QmodelFile* qmodel, int64_t layer) {
  return qmodel != nullptr && std::binary_search(qmodel->dense.begin(), qmodel->dense.end(), layer);
}

std::string hash_of(const QmodelFile& qmodel) {
  Xxh3Stream hash;
  for (const QmodelLayer& layer : qmodel.layers) {
    each_classifier_tensor(layer, qmodel.buckets, qmodel.hidden, qmodel.model.head_dim,
                           [&](const char*, const std::vector<float>& values, const Dims&) {
                             hash.update(std::as_bytes(std::span(values)));
                           });
  }
  return hex(hash.digest());
}

// All that the bytes depend on beside the tokens, the model and the rest of the metadata, and
// nothing that may differ between two runs with the same result, such as threads.
JsonText build_parameters(const BuildOptions& options, const std::string& engine) {
  JsonMembers out;
  if (options.partition == Partition::kPages) {
    out = {{"page_size", options.page_size}};
  } else if (options.partition == Partition::kBuckets) {
    const QmodelFile& q = *options.qmodel;
    out = {{"buckets", q.buckets},
           {"hidden", q.hidden},
           {"trained_for_recent", q.recent},
           {"query_classifier", hash_of(q)}};
  } else {
    out = {{"level_fractions", options.level_fractions},
           {"coarse_keep", options.coarse_keep},
           {"iterations", options.iterations},
           {"seed", options.seed}};
    if (engine != kUsualEngine) out["engine"] = engine;
  }
  if (!options.pass.empty()) out["pass"] = options.pass;
  return out;
}

// The tensors of a layer are in the order of their names.
Status set_state(std::vector<std::vector<StateTensor>> state, IndexMetadata& metadata) {
  if (!state.empty() && std::cmp_not_equal(state.size(), metadata.model.layers)) {
    return Refuse{"build options", Code::kInvalidArgument}(
        "state", concat(state.size(), " entries"), concat(metadata.model.layers, ", one a layer"));
  }
  const auto none = [](const std::vector<StateTensor>& layer) { return layer.empty(); };
  if (!std::all_of(state.begin(), state.end(), none)) metadata.state = std::move(state);
  for (std::vector<StateTensor>& layer : metadata.state) {
    for (StateTensor& tensor : layer) tensor.data = nullptr;
    std::sort(layer.begin(), layer.end(),
              [](const auto& a, const auto& b) { return a.name < b.name; });
  }
  const bool layers = !metadata.state.empty() || !metadata.model.geometry.empty();
  metadata.version = layers ? kVersionOfLayers : kFormatVersion;
  return {};
}

}  // namespace

std::vector<double> default_level_fractions(int levels) {
  std::vector<double> out;
  double fraction = 0.05;
  for (int level = 0; level < levels; ++level, fraction /= 5) out.insert(out.begin(), fraction);
  return out;
}

BuildReport BuildLayout::report() const {
  BuildReport out;
  out.tokens = metadata.tokens;
  out.clustered = clustered;
  out.clusters = clusters;
  if (metadata.buckets > 0 && clustered > 0) out.clusters = {metadata.buckets};
  out.pages = pages;
  out.engine = "none";
  out.fingerprint = fingerprint(metadata.model);
  out.build_id = build_id(metadata_to_strings(metadata), {});
  return out;
}

Result<BuildLayout> plan_layout(const ModelDescription& model, int64_t tokens,
                                const BuildOptions& options, const std::string& engine) {
  SQZ_RETURN_IF_ERROR(check_options(options));
  if (options.qmodel != nullptr) {
    SQZ_RETURN_IF_ERROR(check_same_model(options.qmodel->model, model, "the query classifier"));
    if (!model.rope.is_whole()) {
      return Status(
          Code::kUnsupported,
          "model.rope: found one that turns a part of a head or is of another kind, expected "
          "one that an index describes: a classifier looks at queries before RoPE");
    }
  }
  if (tokens < 1 || tokens > std::numeric_limits<int32_t>::max()) {
    return Refuse{"text", Code::kInvalidArgument}("tokens", tokens, "1 to 2147483647");
  }

  BuildLayout layout;
  bool any_sparse = false;
  for (int64_t l = 0; l < model.layers; ++l) {
    LayerPolicy policy;
    policy.window = model.sliding_window.empty() ? 0 : model.sliding_window[l];
    policy.dense = !model.may_select(l) || is_dense(options.qmodel, l);
    any_sparse |= !policy.dense;
    layout.metadata.layers.push_back(policy);
  }
  const int64_t needed = options.sink + options.tail + 2;
  if (any_sparse && tokens < needed) {
    return Status(
        Code::kInvalidArgument,
        concat("the text has ", tokens, " tokens; an index needs at least ", needed, ": sink ",
               options.sink, ", tail ", options.tail, " and 2 tokens to cluster between them"));
  }
  if (any_sparse) {
    layout.clustered = tokens - options.sink - options.tail;
    if (options.partition == Partition::kPages) {
      layout.pages = page_count(layout.clustered, options.page_size);
    } else if (options.partition == Partition::kKmeans) {
      layout.clusters = cluster_counts(options.level_fractions, tokens, layout.clustered);
    }
  }

  IndexMetadata& metadata = layout.metadata;
  metadata.model = model;
  metadata.tokens = tokens;
  metadata.sink = any_sparse ? options.sink : 0;
  metadata.tail = any_sparse ? options.tail : 0;
  metadata.levels = static_cast<int>(layout.clusters.size());
  metadata.dtype = options.dtype;
  metadata.partition = options.partition;
  metadata.heavy_hitters = options.heavy_hitters && any_sparse;
  metadata.layer_budgets = options.layer_budgets;
  metadata.chat = options.chat;
  metadata.after = options.after;
  if (options.partition == Partition::kPages) {
    metadata.page_size = options.page_size;
    metadata.has_value_means = false;
  }
  if (options.partition == Partition::kBuckets) {
    metadata.buckets = options.qmodel->buckets;
    metadata.hidden = options.qmodel->hidden;
    metadata.has_value_means = false;
  }
  metadata.build = build_parameters(options, engine);
  SQZ_RETURN_IF_ERROR(set_state(options.state, metadata));
  for (int64_t l = 0; l < model.layers; ++l) {
    layout.cluster_counts.push_back(metadata.layers[l].dense ? std::vector<int64_t>()
                                                             : layout.clusters);
  }
  SQZ_RETURN_IF_ERROR(set_rows(options.compress, metadata));
  return layout;
}

uint64_t peak_memory(const BuildLayout& layout, const BuildOptions& options) {
  const ModelDescription& model = layout.metadata.model;
  const auto heads = static_cast<double>(model.kv_heads);
  const auto dim = static_cast<double>(model.head_dim);
  const auto tokens = static_cast<double>(layout.metadata.tokens);
  const auto clustered = static_cast<double>(layout.clustered);
  const auto sparse = static_cast<double>(
      std::count_if(layout.metadata.layers.begin(), layout.metadata.layers.end(),
                    [](const LayerPolicy& layer) { return !layer.dense; }));
  const auto threads = static_cast<double>(resolve_threads(options.threads));
  double clusters = 0;
  for (int64_t n : layout.clusters) clusters += static_cast<double>(n);

  // Stored tensors of the layer that is made and of the one that is written: keys and values in 16
  // bits, positions; means of each cluster.
  const double layers = std::min<double>(2, static_cast<double>(model.layers));
  const double stored = layers * heads * (4 * dim * tokens + 4 * clustered + 4 * dim * clusters);
  // Trees: sums in double, means in float, an assignment and an order a key.
  const double trees = heads * (12 * dim * clusters + 8 * clustered);
  // k-means, a head a thread: unit keys, labels, products, centroids twice, a block of products.
  const double working =
      std::min(threads, heads) * ((4 * dim + 24) * clustered + 8 * dim * clusters + 1048576);
  if (layout.pages > 0) {
    const double bounds = heads * 4 * dim * static_cast<double>(layout.pages);
    return static_cast<uint64_t>(stored + bounds);
  }
  // Calibration keeps centroids and queries of all layers, and two sketches of 94 KB a head.
  const double kept = sparse * heads * (2 * dim * clusters + 4 * clusters);
  const double queries = sparse * 4 * dim * static_cast<double>(model.query_heads * options.tail);
  const double sketches = sparse * heads * 2 * 94208;
  return static_cast<uint64_t>(stored + kept + queries + std::max(trees + working, sketches));
}

}  // namespace sqz
