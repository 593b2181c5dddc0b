// A longer context for an index of buckets. Its buckets are the model's, so keys that are in them
// stay where they are: the result is, byte for byte, the index that one build of all tokens gives.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "libindex/builder.h"

namespace sqz {

// Whether `tokens` lengthen the context of `index`: kUnsupported if its partition is another,
// kCorrupt if there is nothing new, kMismatch if they do not begin with its tokens.
Status check_appendable(const SqzFile& index, std::span<const int32_t> tokens);

// What `index` was built with; `qmodel` is its own (embedded_qmodel()), and borrowed.
BuildOptions options_of(const SqzFile& index, const QmodelFile& qmodel);

// For an engine that has the keys and values of the new tokens: those before come from the index.
//
//   IndexAppender::create -> add_layer (0, 1, ... L-1) -> finish
class IndexAppender {
 public:
  // `tokens`: all ids, [N + n]; those that are new, n, are behind the index's N. `output` may be
  // the index's own path (with `replace`). Beside check_appendable()'s errors, kCorrupt if the
  // index is damaged (it is read whole and checked first), and kUnsupported if it was built without
  // keys and values, or with heavy hitters or a calibration, which need all tokens' attention.
  // `threads`: 0 = all cores.
  static Result<std::unique_ptr<IndexAppender>> create(Env& env,
                                                       std::shared_ptr<const SqzFile> index,
                                                       const std::string& output, bool replace,
                                                       std::span<const int32_t> tokens,
                                                       int threads);

  // keys, values: [Hkv, n, d] of the new tokens, float32, keys after RoPE; borrowed for the call.
  // Errors as IndexBuilder's. Memory: one layer's keys and values of all tokens, in float32.
  Status add_layer(int64_t layer, std::span<const float> keys, std::span<const float> values);
  // Publishes; once, after the last layer.
  Result<BuildReport> finish() { return builder_->finish(); }

 private:
  std::shared_ptr<const SqzFile> index_;
  QmodelFile qmodel_;  // the index's own, which the builder borrows
  int64_t tokens_ = 0;
  std::unique_ptr<IndexBuilder> builder_;
};

}  // namespace sqz
