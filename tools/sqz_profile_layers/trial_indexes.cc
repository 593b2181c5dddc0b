#include "tools/sqz_profile_layers/trial_indexes.h"

#include <unistd.h>

namespace sqz {

std::string TrialIndexes::add(std::span<const int32_t> tokens) {
  windows_.push_back(
      {TemporaryName(concat(output_, ".tmp.", ::getpid(), ".trial", windows_.size())), tokens});
  return windows_.back().name.path();
}

Status TrialIndexes::consume(int64_t window, const LayerCapture& layer) {
  const Window& own = windows_[static_cast<size_t>(window)];
  if (layer.layer == 0) {
    SQZ_ASSIGN_OR_RETURN(builder_, IndexBuilder::create(Env::posix(), own.name.path(), true, model_,
                                                        own.tokens, tokenizer_hash_, options_));
  }
  SQZ_RETURN_IF_ERROR(builder_->add_layer(
      layer.layer, {layer.keys, layer.values, layer.queries, nullptr, layer.attention}));
  if (layer.layer + 1 < model_.layers) return {};
  const Status finished = builder_->finish().status();
  builder_.reset();
  return finished;
}

}  // namespace sqz
