// Trains a query classifier for a model (SAAP, section 4 and appendix A): runs the model over
// windows of text, clusters its keys before RoPE, and teaches a network for each KV head which
// buckets a query's attention falls into.
//
// Memory does not grow with the texts: samples of so many windows as fit QmodelOptions::memory are
// held, and further windows replace the oldest as the training goes on. The same texts, options and
// seed give the same result on the same kind of device.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "formats/qmodel_file.h"

namespace sqz {

class Runner;

struct QmodelText {
  std::string name;  // opens messages: "book.txt"
  std::vector<int32_t> tokens;
};

struct QmodelProgress {
  const char* phase = "";                // "cluster", "capture", "train", "test"
  double done = 0;                       // 0 .. 1, of everything
  bool checked = false;                  // the fields below are new
  int64_t step = 0;                      // updates made
  double loss = 0;                       // mean KL divergence since the last check, nats
  std::vector<QmodelRecall> recall;      // of held-out windows' keys, all queries,
  std::vector<QmodelRecall> far_recall;  // and those whose best key is far
};

inline constexpr int64_t kLeastBucketKeys = 32;  // for a bucket to be clustered

struct QmodelOptions {
  int64_t buckets = 1024;  // C
  int64_t hidden = 1024;   // H
  int64_t window =
      16384;  // tokens of a dense pass; shorter texts and rests are used from half of it
  int64_t recent = 1024;             // keys nearer than this are attended exactly and do not count
  int64_t sink = 1;                  // nor do the first so many
  int32_t first_token = -1;          // put in front of windows that do not begin with it; -1: none
  std::vector<int64_t> dense = {0};  // layers without buckets; windowed layers join them

  int64_t steps = 4000;
  int64_t batch = 1024;  // queries of a step, of each KV head
  double learning_rate = 2e-3;
  bool decay = true;              // the rate falls to 0 along a cosine; else it is constant
  int64_t positions = 2048;       // tokens of a window whose queries are looked at
  int64_t queries = 1024;         // of these, kept at most for each KV head,
  double near_queries = 0.5;      // this share of them for queries whose best key is recent: 0 .. 1
  int64_t keys_per_bucket = 128;  // keys that are clustered, of each KV head, by bucket
  int64_t checks = 20;            // times that held-out recall is measured
  int64_t patience = 10;          // checks without a better one end the training
  uint64_t seed = 0;
  uint64_t memory = uint64_t{4} << 30;  // bytes of samples to train on, on the model's device
  std::string device = "cpu";           // where the network trains: the model's
  int threads = 0;                      // of the clustering
  std::function<Status(const QmodelProgress&)>
      progress;  // may be empty; an error stops the training
};

// Means over layers, heads and queries of the texts that were not trained on.
struct QmodelScores {
  std::string method;        // that orders the buckets: "classifier", "kmeans" (qmodel_recall.h)
  bool far_queries = false;  // of queries whose best key is far; else of all
  std::vector<QmodelRecall> recall;  // by the share of the window's keys that is read
  std::vector<double> errors;  // standard errors of the recalls, over windows; 0 of fewer than two
};

struct QmodelTrained {
  QmodelFile file;                                // without tokenizer hash
  int64_t windows = 0, tokens = 0, held_out = 0;  // trained on; windows measured with
  int64_t steps = 0;                              // made; those of `file` may be fewer
  double loss = 0;
  std::vector<QmodelScores> scores;
};

// `test`: texts to measure with, in windows of their own; empty: some windows of `texts` are held
// out. `file.recall` is the classifier's over all queries.
//
// kCorrupt if the texts are too short for so many buckets, and says how many tokens are needed;
// kNumeric if the loss is not a number.
Result<QmodelTrained> train_qmodel(Runner& runner, std::span<const QmodelText> texts,
                                   std::span<const QmodelText> test, const QmodelOptions& options);

}  // namespace sqz
