#include "libruntime/session/account.h"

#include <algorithm>

#include "libruntime/attention/coded_products.h"

namespace sqz {
namespace {

// Finest clusters of which a key is in the runs.
int64_t clusters_of(const CodedHead& keys, std::span<const KeyRun> runs) {
  int64_t count = 0, before = -1;
  for (const KeyRun& run : runs) {
    const int64_t first = keys.cluster_of(run.first, std::max<int64_t>(before, 0));
    const int64_t last = keys.cluster_of(int64_t{run.first} + run.length - 1, first);
    count += last - std::max(first, before + 1) + 1;
    before = last;
  }
  return count;
}

}  // namespace

void Counters::add(const Counters& other, uint64_t times) {
  selections += times * other.selections;
  keys_read += times * other.keys_read;
  keys_possible += times * other.keys_possible;
  bytes_read += times * other.bytes_read;
  bytes_dense += times * other.bytes_dense;
}

Account::Account(const ServedIndex& index) : index_(index), layers_(index.layers.size()) {}

int64_t Account::bytes_read(const LayerView& view, int64_t head, const HeadSelection& s) const {
  const int64_t key = view.head_dim * dtype_size(view.dtype);
  const int64_t value = view.value_dim * dtype_size(view.dtype);
  const int64_t exact = view.exact - s.exact_skipped;
  int64_t bytes = exact * (key + value) + s.centroids * key + s.read.total * view.slot_bytes();
  if (view.coded_keys.bits > 0) {
    // Rows of codes need their clusters' means. A selector that scores centroids has read the
    // keys'.
    const CodedHead keys = coded_head(view, view.coded_keys, false, head);
    bytes += clusters_of(keys, s.read.runs()) * (s.centroids > 0 ? value : key + value);
  }
  return bytes;
}

void Account::add(int64_t layer, std::span<const HeadSelection> selections, int64_t times) {
  const LayerView& view = index_.layers[layer];
  const int64_t row_bytes = (view.head_dim + view.value_dim) * dtype_size(view.dtype);
  // Keys that were left out of a pruned layer count as possible, too.
  const bool pruned = view.slots > 0 && index_.metadata().pruned.has_value();
  const int64_t possible = pruned ? index_.metadata().tokens - view.exact : view.slots;
  Counters sum;
  for (size_t i = 0; i < selections.size(); ++i) {
    const int64_t head = static_cast<int64_t>(i) % view.kv_heads;
    sum.keys_read += selections[i].read.total;
    sum.keys_possible += possible;
    sum.bytes_read += bytes_read(view, head, selections[i]);
    sum.bytes_dense += (possible + view.exact) * row_bytes;
  }
  sum.selections = selections.size() / static_cast<uint64_t>(view.kv_heads);
  layers_[static_cast<size_t>(layer)].add(sum, static_cast<uint64_t>(times));
}

Counters Account::total() const {
  Counters sum;
  for (const Counters& of_layer : layers_) sum.add(of_layer);
  return sum;
}

void Account::clear() {
  std::fill(layers_.begin(), layers_.end(), Counters());
}

}  // namespace sqz
