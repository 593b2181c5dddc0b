// A query classifier, the .sqz file of kind `qmodel` (docs/format.md): for each KV head of a model
// the buckets that its keys fall into, and a small network that says which buckets a query needs
// (SAAP, section 4). Trained once a model; any index of that model may use it.
//
// Both see vectors before RoPE, without the position of the token.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/base/json.h"
#include "formats/sqz_file.h"

namespace sqz {

// One layer's buckets and networks; all empty in a dense layer. float32, whatever the file's type.
// With q [d] a query before RoPE, of any head of the group:
//   hidden = max(0, hidden_weight q + hidden_bias)          [H]
//   logits = output_weight hidden + output_bias             [C]
// A logit is the log, but for a constant, of the attention that q pays to a key of the bucket on
// average. Where a context has n[c] keys in bucket c, the softmax over logits[c] + log n[c] is the
// share of the attention that each bucket is to hold. Batch norm is folded into hidden_weight and
// hidden_bias.
struct QmodelLayer {
  std::vector<float> centroids;      // [Hkv, C, d] unit vectors; a key belongs to the bucket with
                                     // the largest product, the lowest number among equals
  std::vector<float> hidden_weight;  // [Hkv, H, d]
  std::vector<float> hidden_bias;    // [Hkv, H]
  std::vector<float> output_weight;  // [Hkv, C, H]
  std::vector<float> output_bias;    // [Hkv, C]
};

// Mean share of the attention mass that the best buckets held, on texts that were not trained on.
struct QmodelRecall {
  double selectivity = 0;  // share of the keys that were read, in (0, 1]
  double recall = 0;       // in [0, 1]
};

// The layer's tensors, borrowed.
ClassifierView view_of(const QmodelLayer& layer, int64_t hidden);

struct QmodelFile : FileOrigin {
  int64_t buckets = 0;  // C, at least 2
  int64_t hidden = 0;   // H, at least 1
  int64_t recent = 0;   // it was trained on keys further back than so many tokens; nearer keys
                        // are to be attended exactly
  DType dtype = DType::kF32;         // of the two weights in the file: F32 or BF16; the rest is F32
  std::vector<int64_t> dense;        // ascending: layers without buckets, which read everything
  JsonMembers training;              // how it was made: names to numbers and strings
  std::vector<QmodelRecall> recall;  // ascending selectivity

  std::vector<QmodelLayer> layers;  // [model.layers]
};

// Publishes by AtomicFile; returns the file's size. kInvalidArgument names what is out of range,
// before a file is created; kExists if PATH is there and `replace` is false.
Result<uint64_t> write_qmodel_file(Env& env, const std::string& path, bool replace,
                                   QmodelFile qmodel);

// Reads and checks everything. kCorrupt or kUnsupported, naming the field, if the file is not a
// whole query classifier.
Result<QmodelFile> read_qmodel_file(const std::string& path, Env& env = Env::posix());

}  // namespace sqz
