// The query classifiers of many KV heads, trained at once (SAAP, section 4): for each head of the
// batch a network d -> H -> C with batch norm and ReLU between, KL divergence from the attention
// mass of each bucket, Adam. The heads share nothing but the matrix products.
//
// Logits are of the mean attention to a key of each bucket (formats/qmodel_file.h): a bucket's
// share of the attention is the softmax over them with the logs of the buckets' sizes added.
#pragma once

#include <cstdint>
#include <memory>

#include "training/aten.h"

namespace torch::optim {
class Adam;
}

namespace sqz::training {

struct NetworkShape {
  int64_t heads = 0;    // n: networks in the batch
  int64_t dim = 0;      // d
  int64_t hidden = 0;   // H
  int64_t buckets = 0;  // C
};

// Batch norm folded into the first layer, as a .sqz of kind qmodel stores it.
struct FoldedNetwork {
  at::Tensor hidden_weight, hidden_bias;  // [n, H, d], [n, H]
  at::Tensor output_weight, output_bias;  // [n, C, H], [n, C]
};

struct NetworkBatch {
  at::Tensor queries;    // [n, B, d], before RoPE
  at::Tensor masses;     // [n, B, C], rows sum to 1
  at::Tensor log_sizes;  // [n, B, C], as log_sizes() makes them; masses are 0 where no key is
  at::Tensor weights;    // [n, B]: 1, or 0 for a row that does not count
};

// Logs of numbers of keys. The log of 0 is finite, so that 0 times it is 0.
at::Tensor log_sizes(const at::Tensor& sizes);

// [n]: mean KL divergence of each head's rows, in nats.
at::Tensor divergence(const at::Tensor& logits, const NetworkBatch& batch);

class Network {
 public:
  // Random weights, the same for a seed on every device.
  Network(const NetworkShape& shape, uint64_t seed, at::Device device);
  ~Network();
  Network(const Network&) = delete;
  Network& operator=(const Network&) = delete;

  // One step of Adam. The running statistics follow the batch's. Returns the divergence before it.
  // The tensors of the batch must be no inference tensors.
  at::Tensor train(const NetworkBatch& batch, double learning_rate);

  FoldedNetwork fold() const;
  int64_t steps() const { return steps_; }

 private:
  at::Tensor hidden_weight_;    // [n, H, d]
  at::Tensor scale_, shift_;    // [n, H]: batch norm's gamma and beta
  at::Tensor output_weight_;    // [n, C, H]
  at::Tensor output_bias_;      // [n, C]
  at::Tensor mean_, variance_;  // [n, H]: batch norm's running statistics
  std::unique_ptr<torch::optim::Adam> adam_;
  int64_t steps_ = 0;
};

// Logits of every bucket: queries [n, B, d] -> [n, B, C].
at::Tensor bucket_logits(const FoldedNetwork& network, const at::Tensor& queries);

// a [n, x, y] times b [n, y, z]. On a CPU each head is multiplied by one thread: the result does
// not depend on the number of threads.
at::Tensor head_products(const at::Tensor& a, const at::Tensor& b);

}  // namespace sqz::training
