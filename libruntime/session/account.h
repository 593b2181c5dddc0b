// Counts what a session has read, layer by layer: the numbers of sqz_stats.
#pragma once

#include <span>
#include <vector>

#include "libruntime/selection.h"
#include "libruntime/session/served_index.h"
#include "libruntime/session/serving_session.h"

namespace sqz {

class Account {
 public:
  explicit Account(const ServedIndex& index);

  // Adds these selections of a layer, [blocks, Hkv], `times` times.
  void add(int64_t layer, std::span<const HeadSelection> selections, int64_t times);
  const Counters& of(int64_t layer) const { return layers_[static_cast<size_t>(layer)]; }
  Counters total() const;
  void clear();

 private:
  int64_t bytes_read(const LayerView& view, int64_t head, const HeadSelection& s) const;

  const ServedIndex& index_;
  std::vector<Counters> layers_;
};

}  // namespace sqz
