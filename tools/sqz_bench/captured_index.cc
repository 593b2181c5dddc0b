#include <algorithm>
#include <cmath>

#include "formats/capture.h"
#include "libindex/builder.h"
#include "libindex/layer_store.h"
#include "libindex/order.h"
#include "tools/sqz_bench/made_index.h"

namespace sqz::bench {
namespace {

// What is taken of a capture: KV heads with the queries of their groups, each vector widened.
struct Heads {
  std::vector<std::vector<float>> keys, values;  // [Hkv][tokens, d of the capture]
  std::vector<std::vector<float>> queries;       // [Hkv][group][n, d of the capture]
};

Status check_shape(const Options& options, const CaptureInfo& info) {
  const ModelDescription& model = info.model;
  const int64_t heads = model.layers * model.kv_heads;
  const int64_t query_heads = options.kv_heads * model.group_size();
  const auto positions = std::ssize(info.query_positions);
  const struct {
    bool fine;
    const char* option;
    int64_t found;
    std::string expected;
  } checks[] = {
      {options.kv_heads <= heads, "--kv-heads", options.kv_heads,
       concat("at most ", heads, ", the KV heads of ")},
      {options.query_heads == query_heads, "--heads", options.query_heads,
       concat(query_heads, ", the groups of ")},
      {options.head_dim % model.head_dim == 0, "--head-dim", options.head_dim,
       concat("a multiple of ", model.head_dim, ", the dimensions of ")},
      {positions >= 2, "--capture", positions,
       "at least 2 query positions, to calibrate and to ask, in "},
  };
  for (const auto& [fine, option, found, expected] : checks) {
    if (fine) continue;
    return {Code::kInvalidArgument,
            bad_field("options", option, concat(found), expected + options.capture)};
  }
  if (!info.keys_post_rope) {
    return {Code::kInvalidArgument,
            bad_field(options.capture, "rope", "pre", "post: keys as they are attended")};
  }
  if (info.tokens.size() < 1000) {
    return {Code::kInvalidArgument,
            bad_field(options.capture, "tokens", concat(info.tokens.size()), "at least 1000")};
  }
  return {};
}

Result<Heads> read_heads(const CaptureReader& capture, const Options& options, int64_t tokens) {
  const ModelDescription& model = capture.info().model;
  const int64_t all = model.layers * model.kv_heads, dim = model.head_dim;
  const auto captured = static_cast<int64_t>(capture.info().tokens.size());
  const int64_t each = std::ssize(capture.info().query_positions) * model.group_size() * dim;
  Heads out;
  CapturedLayer data;
  int64_t read = -1;
  for (int64_t i = 0; i < options.kv_heads; ++i) {
    const int64_t from = i * all / options.kv_heads, head = from % model.kv_heads;
    if (from / model.kv_heads != read) {
      read = from / model.kv_heads;
      SQZ_ASSIGN_OR_RETURN(data, capture.read_layer(read));
    }
    const auto rows = [&](const std::vector<float>& of) {
      const auto begin = of.begin() + head * captured * dim;
      return std::vector<float>(begin, begin + tokens * dim);
    };
    out.keys.push_back(rows(data.keys));
    out.values.push_back(rows(data.values));
    const auto queries = data.queries.begin() + head * each;
    out.queries.emplace_back(queries, queries + each);
  }
  return out;
}

// From the heads of a capture to the layer that is written: `copies` contexts, vectors of `wide`
// dimensions.
struct Tiler {
  const Options& options;
  Heads heads;
  Tiling copies;
  int64_t group, dim, wide;

  // A vector, as many times as make up `wide` dimensions.
  void append_wide(const float* vector, std::vector<float>& out) const {
    for (int64_t part = 0; part < wide / dim; ++part) out.insert(out.end(), vector, vector + dim);
  }

  // [Hkv, sink + copies * slots + tail, wide]: the copies between one sink and one tail.
  std::vector<float> tiled(const std::vector<std::vector<float>>& of) const {
    std::vector<float> out;
    for (const std::vector<float>& rows : of) {
      const auto append = [&](int64_t first, int64_t count) {
        for (int64_t t = first; t < first + count; ++t) append_wide(rows.data() + t * dim, out);
      };
      append(0, kSink);
      for (int64_t copy = 0; copy < copies.copies; ++copy) append(kSink, copies.slots);
      append(kSink + copies.slots, kTail);
    }
    return out;
  }

  // The clusters of one copy, one after another.
  SlotOrder repeated(const SlotOrder& order) const {
    const size_t levels = order.offsets.size();
    SlotOrder out;
    out.offsets.assign(levels, {0});
    out.means.resize(levels);
    for (uint32_t copy = 0; copy < copies.copies; ++copy) {
      for (size_t k = 0; k < levels; ++k) {
        const std::vector<uint32_t>& from = order.offsets[k];
        for (size_t i = 1; i < from.size(); ++i) {
          out.offsets[k].push_back(from[i] + copy * from.back());
          append_wide(order.means[k].data() + static_cast<int64_t>(i - 1) * dim, out.means[k]);
        }
      }
      const auto first = copy * static_cast<uint32_t>(copies.slots);
      for (const uint32_t key : order.keys) out.keys.push_back(first + key);
    }
    return out;
  }

  Result<std::vector<SlotOrder>> orders() const {
    SQZ_ASSIGN_OR_RETURN(const auto engine, make_kmeans_engine({options.kmeans_engine, dim,
                                                                std::max(options.gpu, 0)}));
    std::vector<const float*> keys;
    for (const auto& rows : heads.keys) keys.push_back(rows.data() + kSink * dim);
    TreeOptions tree;
    tree.clusters = made_clusters(options, copies.slots, copies.slots);
    tree.seed = options.seed;
    tree.threads = options.threads;
    SQZ_ASSIGN_OR_RETURN(const std::vector<HeadTree> trees,
                         build_trees(*engine, keys, copies.slots, dim, tree, {}));
    std::vector<SlotOrder> out;
    for (const HeadTree& one : trees) out.push_back(repeated(depth_first_order(one, dim)));
    return out;
  }

  // Of each group every second query, the even or the odd ones, from number `first` of these on,
  // `count` of them, over and over: [count, Hq, wide].
  std::vector<float> asked(bool odd, int64_t first, int64_t count, float scale) const {
    std::vector<float> out;
    const int64_t have = std::ssize(heads.queries[0]) / (group * dim);
    const int64_t usable = odd ? have / 2 : (have + 1) / 2;
    for (int64_t t = 0; t < count; ++t) {
      const int64_t at = (odd ? 1 : 0) + (first + t) % usable * 2;
      for (const std::vector<float>& queries : heads.queries) {
        for (int64_t g = 0; g < group; ++g) {
          append_wide(queries.data() + (g * have + at) * dim, out);
        }
      }
    }
    for (float& x : out) x *= scale;
    return out;
  }
};

}  // namespace

Tiling tiling(int64_t tokens, int64_t captured) {
  const int64_t exact = kSink + kTail, slots = tokens - exact, most = captured - exact;
  const int64_t copies = (slots + most - 1) / most;
  return {copies, slots / copies};
}

Result<CapturedIndex> make_captured_index(const Options& options, int64_t tokens, int64_t sets,
                                          int64_t query_tokens) {
  SQZ_ASSIGN_OR_RETURN(const auto capture, CaptureReader::open(options.capture));
  const CaptureInfo& info = capture->info();
  SQZ_RETURN_IF_ERROR(check_shape(options, info));
  const Tiling copies = tiling(tokens, std::ssize(info.tokens));
  const int64_t made = copies.copies * copies.slots + kSink + kTail;
  SQZ_ASSIGN_OR_RETURN(Heads heads, read_heads(*capture, options, copies.slots + kSink + kTail));
  const int64_t dim = info.model.head_dim, wide = options.head_dim;
  const Tiler tiler{options, std::move(heads), copies, info.model.group_size(), dim, wide};
  SQZ_ASSIGN_OR_RETURN(const std::vector<SlotOrder> orders, tiler.orders());
  IndexMetadata metadata = made_metadata(options, made, 1);
  metadata.levels = static_cast<int>(options.level_fractions.size());

  CapturedIndex index;
  SQZ_ASSIGN_OR_RETURN(index.file, IndexFile::create(options));
  LayerStore store(options.kv_heads, made, wide, DType::kBF16);
  SQZ_RETURN_IF_ERROR(store.fill_sparse(tiler.tiled(tiler.heads.keys).data(),
                                        tiler.tiled(tiler.heads.values).data(), orders, kSink, true,
                                        options.threads));
  // Of a product that has every term wide / dim times.
  const auto scale =
      static_cast<float>(info.model.attention_scale * static_cast<double>(dim) /
                         (static_cast<double>(wide) * metadata.model.attention_scale));
  const auto calibrating = (std::ssize(info.query_positions) + 1) / 2;
  SQZ_RETURN_IF_ERROR(write_index(index.file->path(), options, metadata, store.data(),
                                  tiler.asked(false, 0, calibrating, scale)));
  for (int64_t set = 0; set < sets; ++set) {
    index.queries.push_back(tiler.asked(true, set * query_tokens, query_tokens, scale));
  }
  return index;
}

}  // namespace sqz::bench
