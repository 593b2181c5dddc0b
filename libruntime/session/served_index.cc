#include "libruntime/session/served_index.h"

#include "formats/sqz_layout.h"

namespace sqz {
namespace {

// Arrays are [Hkv, ...]: a range of heads is a part of them.
struct HeadRange {
  int64_t first, count, heads;

  void narrow(const IndexMetadata& metadata, LayerView& view) const {
    each_tensor(metadata, view, [&](const std::string&, auto& pointer, DType dtype, Dims dims) {
      int64_t bytes = dtype_size(dtype);  // of a head
      for (const int64_t size : dims) bytes *= size;
      pointer = reinterpret_cast<std::decay_t<decltype(pointer)>>(
          reinterpret_cast<const std::byte*>(pointer) + first * bytes);
    });
    view.kv_heads = count;
  }
  void narrow_arrays(auto&... arrays) const {
    const auto narrow_one = [&](auto& array) {
      const auto each = std::ssize(array) / heads;
      array = {array.begin() + first * each, array.begin() + (first + count) * each};
    };
    (narrow_one(arrays), ...);
  }
  void narrow(LayerTable& table) const {
    for (LevelTable& level : table.level)
      narrow_arrays(level.offsets, level.sizes, level.log_sizes);
    narrow_arrays(table.bucket_offsets, table.heavy, table.bucket_sizes, table.bucket_bias);
  }
};

}  // namespace

Result<std::shared_ptr<const ServedIndex>> range_of_heads(std::shared_ptr<const ServedIndex> index,
                                                          int64_t first, int64_t count) {
  const ModelDescription& model = index->metadata().model;
  const int64_t heads = model.kv_heads, group = model.group_size();
  if (first < 0 || first >= heads || count < 0 || count > heads - first) {
    return Status(Code::kInvalidArgument,
                  concat("options.first_kv_head and kv_heads: found ", first, " and ", count,
                         ", expected a range of the index's ", heads, " KV heads"));
  }
  if (count == 0) count = heads - first;
  if (count == heads) return index;
  auto part = std::make_shared<ServedIndex>(*index);
  part->first_head = first;
  part->of_range = index->metadata();
  part->of_range->model.kv_heads = count;
  part->of_range->model.query_heads = count * group;
  for (LayerGeometry& layer : part->of_range->model.geometry) {
    if (layer.kv_heads * first % heads != 0 || layer.kv_heads * count % heads != 0) {
      return Status(Code::kUnsupported,
                    concat("options.first_kv_head and kv_heads: found ", first, " and ", count,
                           ", expected a range that divides the ", layer.kv_heads,
                           " KV heads of every layer"));
    }
    layer.query_heads = layer.query_heads * count / heads;
    layer.kv_heads = layer.kv_heads * count / heads;
  }
  part->of = std::move(index);
  // Views point to the whole index, which `of` keeps.
  for (size_t l = 0; l < part->layers.size(); ++l) {
    LayerView& view = part->layers[l];
    const int64_t all = view.kv_heads;
    const HeadRange range = {first * all / heads, count * all / heads, all};
    range.narrow(part->of->metadata(), view);
    range.narrow(part->tables[l]);
  }
  return std::shared_ptr<const ServedIndex>(std::move(part));
}

Result<std::shared_ptr<const ServedIndex>> make_served_index(std::shared_ptr<const SqzFile> file) {
  auto index = std::make_shared<ServedIndex>();
  index->file = std::move(file);
  const IndexMetadata& metadata = index->metadata();
  for (int64_t layer = 0; layer < metadata.model.layers; ++layer) {
    index->layers.push_back(index->file->layer(layer));
    SQZ_ASSIGN_OR_RETURN(LayerTable table,
                         make_layer_table(index->layers.back(), layer, index->file->path()));
    index->tables.push_back(std::move(table));
  }
  SQZ_ASSIGN_OR_RETURN(index->calibration, index->file->calibration());
  index->context_id = metadata.context_id();
  return std::shared_ptr<const ServedIndex>(std::move(index));
}

}  // namespace sqz
