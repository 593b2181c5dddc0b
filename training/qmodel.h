// Trains a classifier for a model (SAAP, section 4 and appendix A): runs the model over windows of
// text, clusters its keys before RoPE, and teaches a network for each KV head which buckets hold
// the attention of a query.
//
// Memory does not grow with the texts. The pool holds the samples of as many windows as fit
// QmodelOptions::memory. During the training new windows replace the oldest ones. The same texts,
// options and seed give the same result on the same kind of device.
#pragma once

#include "formats/qmodel_file.h"
#include "training/runner.h"

namespace sqz {

// A measurement during the training.
struct QmodelCheck {
  int64_t step = 0;                      // updates made
  double loss = 0;                       // mean KL divergence since the last check, nats
  std::vector<QmodelRecall> recall;      // of all queries of the held-out windows
  std::vector<QmodelRecall> far_recall;  // of the queries whose best key is far
};

inline constexpr int64_t kLeastBucketKeys = 32;  // clustering needs so many keys a bucket

struct QmodelOptions {
  int64_t buckets = 1024;    // C
  int64_t hidden = 1024;     // H
  int64_t window = 16384;    // tokens of a dense pass; a shorter text or rest needs half of them
  int64_t recent = 1024;     // the last so many keys are attended exactly and do not count
  int64_t sink = 1;          // the first so many keys do not count either
  int32_t first_token = -1;  // begins every window; -1: no such token
  std::vector<int64_t> dense = {0};  // layers without buckets; layers with a window are added

  int64_t steps = 4000;
  int64_t batch = 1024;  // queries of a step, of each KV head
  double learning_rate = 2e-3;
  bool decay = true;              // the rate falls to 0 along a cosine; else it is constant
  int64_t positions = 2048;       // tokens of a window whose queries are captured
  int64_t queries = 1024;         // most queries of a window that are kept, of each KV head
  double near_queries = 0.5;      // share of these whose best key is not far: 0 .. 1
  int64_t keys_per_bucket = 128;  // keys that are clustered for each bucket, of each KV head
  int64_t checks = 20;            // times that held-out recall is measured; the best is kept
  uint64_t seed = 0;
  uint64_t memory = uint64_t{4} << 30;  // bytes of samples to train on, on the model's device
  std::string device = "cpu";           // of the network; the model's
  int threads = 0;                      // of the clustering
  std::function<void(double done)> progress = [](double) {};  // 0 .. 1, of everything
  std::function<void(const QmodelCheck&)> check = [](const QmodelCheck&) {};
};

// Means over layers, heads and queries of the texts that were not trained on.
struct QmodelScores {
  std::string method;        // which orders the buckets: "classifier" or "kmeans" (qmodel_recall.h)
  bool far_queries = false;  // of the queries whose best key is far; else of all
  std::vector<QmodelRecall> recall;  // by the share of the window's keys that is read
  std::vector<double> errors;  // standard errors of the recalls, over windows; 0 of fewer than two
};

struct QmodelTrained {
  QmodelFile file;                  // without tokenizer hash
  int64_t windows = 0, tokens = 0;  // of the training
  int64_t held_out = 0;             // windows of the measurement
  int64_t steps = 0;                // of the training; `file` may be of an earlier one
  double loss = 0;
  std::vector<QmodelScores> scores;
};

// The tools check the ranges of single options; kInvalidArgument for a window or a layer that does
// not fit the model or the other options. Measures with windows of `test`. If it is empty, some
// windows of `texts` are held out for that. `file.recall` is the classifier's over all queries.
//
// kCorrupt if the texts are too short for so many buckets; the message says how many tokens are
// needed. kNumeric if the loss is not a number.
Result<QmodelTrained> train_qmodel(Runner& runner, std::span<const TokenText> texts,
                                   std::span<const TokenText> test, const QmodelOptions& options);

}  // namespace sqz
