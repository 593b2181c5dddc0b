#include "tools/sqz_bench/random_index.h"

#include <algorithm>
#include <cmath>

#include "formats/qmodel_file.h"
#include "libindex/parallel.h"
#include "tools/sqz_bench/made_numbers.h"

namespace sqz::bench {
namespace {

constexpr int64_t kPageSize = 16;

struct Layer {
  std::vector<BFloat16> keys, values;              // [Hkv, M, d]
  std::vector<BFloat16> exact_keys, exact_values;  // [Hkv, E, d]
  std::vector<uint32_t> positions;                 // [Hkv, M]
  std::vector<BFloat16> page_min, page_max;        // [Hkv, P, d]
  std::vector<uint32_t> offsets;                   // [Hkv, C + 1]
  QmodelLayer network;
};

void fill(std::vector<BFloat16>& out, int64_t head, int64_t count, NormalRandom& random) {
  BFloat16* to = out.data() + head * count;
  for (int64_t i = 0; i < count; ++i) to[i] = to_bfloat16(random.normal());
}

void fill(std::vector<float>& out, int64_t head, int64_t count, double scale,
          NormalRandom& random) {
  float* to = out.data() + head * count;
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<float>(scale) * random.normal();
}

void fill_pages(const Options& o, int64_t slots, int64_t head, Layer& layer) {
  const int64_t d = o.head_dim, pages = (slots + kPageSize - 1) / kPageSize;
  const auto less = [](BFloat16 a, BFloat16 b) { return to_float(a) < to_float(b); };
  for (int64_t i = 0; i < pages * d; ++i) {
    const int64_t first = i / d * kPageSize, last = std::min(first + kPageSize, slots);
    const BFloat16* key = layer.keys.data() + head * slots * d + i % d;
    BFloat16 &min = layer.page_min[static_cast<size_t>(head * pages * d + i)],
             &max = layer.page_max[static_cast<size_t>(head * pages * d + i)];
    min = max = key[first * d];
    for (int64_t slot = first; slot < last; ++slot) {
      min = std::min(min, key[slot * d], less);
      max = std::max(max, key[slot * d], less);
    }
  }
}

void fill_buckets(const Options& o, int64_t slots, int64_t head, NormalRandom& random,
                  Layer& layer) {
  const int64_t d = o.head_dim;
  fill(layer.network.centroids, head, o.buckets * d, 1 / std::sqrt(d), random);
  fill(layer.network.hidden_weight, head, o.hidden * d, 1 / std::sqrt(d), random);
  fill(layer.network.hidden_bias, head, o.hidden, 0.1, random);
  fill(layer.network.output_weight, head, o.buckets * o.hidden, 2 / std::sqrt(o.hidden), random);
  fill(layer.network.output_bias, head, o.buckets, 0.1, random);
  const auto offsets = random_offsets(o.buckets, slots, random);
  std::copy(offsets.begin(), offsets.end(), layer.offsets.begin() + head * (o.buckets + 1));
  uint32_t* positions = layer.positions.data() + head * slots;
  for (int64_t i = slots - 1; i > 0; --i) std::swap(positions[i], positions[random.below(i + 1)]);
}

void fill_head(const Options& o, int64_t slots, int64_t head, Layer& layer) {
  NormalRandom random(o.seed * 7919 + static_cast<uint64_t>(head) + 1);
  const int64_t d = o.head_dim, exact = kSink + kTail;
  fill(layer.keys, head, slots * d, random);
  fill(layer.values, head, slots * d, random);
  fill(layer.exact_keys, head, exact * d, random);
  fill(layer.exact_values, head, exact * d, random);
  uint32_t* positions = layer.positions.data() + head * slots;
  std::iota(positions, positions + slots, static_cast<uint32_t>(kSink));
  if (o.selector == "quest") {
    fill_pages(o, slots, head, layer);
  } else {
    fill_buckets(o, slots, head, random, layer);
  }
}

Layer make_layer(const Options& o, int64_t slots) {
  Layer layer;
  const auto heads = static_cast<size_t>(o.kv_heads);
  const auto count = [&](int64_t each) { return heads * static_cast<size_t>(each); };
  layer.keys.resize(count(slots * o.head_dim));
  layer.values.resize(layer.keys.size());
  layer.exact_keys.resize(count((kSink + kTail) * o.head_dim));
  layer.exact_values.resize(layer.exact_keys.size());
  layer.positions.resize(count(slots));
  if (o.selector == "quest") {
    layer.page_min.resize(count((slots + kPageSize - 1) / kPageSize * o.head_dim));
    layer.page_max.resize(layer.page_min.size());
  } else {
    layer.offsets.resize(count(o.buckets + 1));
    layer.network.centroids.resize(count(o.buckets * o.head_dim));
    layer.network.hidden_weight.resize(count(o.hidden * o.head_dim));
    layer.network.hidden_bias.resize(count(o.hidden));
    layer.network.output_weight.resize(count(o.buckets * o.hidden));
    layer.network.output_bias.resize(count(o.buckets));
  }
  (void)parallel_for(o.kv_heads, o.threads, [&](int64_t head) {
    fill_head(o, slots, head, layer);
    return Status();
  });
  return layer;
}

}  // namespace

Result<std::unique_ptr<TemporaryFile>> make_random_index(const Options& options, int64_t tokens) {
  const int64_t slots = tokens - kSink - kTail;
  const bool pages = options.selector == "quest";
  if (!pages && options.buckets > slots) {
    return Status(Code::kInvalidArgument,
                  bad_field("options", "--buckets", concat(options.buckets),
                            concat("at most the ", slots, " clustered keys")));
  }
  SQZ_ASSIGN_OR_RETURN(auto file, index_file(options));
  IndexMetadata metadata = made_metadata(options, tokens, 1);
  metadata.partition = pages ? Partition::kPages : Partition::kBuckets;
  metadata.levels = 0;
  metadata.has_value_means = false;
  metadata.page_size = pages ? kPageSize : 0;
  metadata.buckets = pages ? 0 : options.buckets;
  metadata.hidden = pages ? 0 : options.hidden;
  const Layer layer = make_layer(options, slots);
  LayerData data;
  data.positions = layer.positions;
  if (pages) {
    data.page_min = std::as_bytes(std::span(layer.page_min));
    data.page_max = std::as_bytes(std::span(layer.page_max));
  } else {
    data.bucket_offsets = layer.offsets;
    data.classifier = &layer.network;
  }
  data.keys = std::as_bytes(std::span(layer.keys));
  data.values = std::as_bytes(std::span(layer.values));
  data.exact_keys = std::as_bytes(std::span(layer.exact_keys));
  data.exact_values = std::as_bytes(std::span(layer.exact_values));
  SQZ_ASSIGN_OR_RETURN(
      const auto writer,
      SqzWriter::create(Env::posix(), file->path(), false, metadata, {{{}, slots, kSink + kTail}}));
  SQZ_RETURN_IF_ERROR(writer->write_layer(0, data));
  SQZ_RETURN_IF_ERROR(writer->commit({}).status());
  return file;
}

std::vector<std::vector<float>> random_queries(const ModelDescription& model, int64_t sets,
                                               int64_t tokens, uint64_t seed) {
  std::vector<std::vector<float>> out;
  NormalRandom random(seed * 31 + 17);
  for (int64_t set = 0; set < sets; ++set) {
    auto& queries =
        out.emplace_back(static_cast<size_t>(tokens * model.query_heads * model.head_dim));
    for (float& x : queries) x = random.normal();
  }
  return out;
}

}  // namespace sqz::bench
