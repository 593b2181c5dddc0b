// The query classifiers of many KV heads, trained at once (SAAP, section 4): for each head of the
// batch a network d -> H -> C with batch norm and ReLU between, KL divergence from the attention
// mass of each bucket, Adam. The heads share nothing but the matrix products.
//
// Logits are of the mean attention to a key of each bucket (formats/qmodel_file.h): a bucket's
// share of the attention is the softmax over them with the logs of the buckets' sizes added.
//
// Gradients are written out, so that nothing of LibTorch's autograd is needed.
#pragma once

#include <cstdint>

#include "training/aten.h"

namespace sqz::training {

struct NetworkShape {
  int64_t heads = 0;    // n: networks in the batch
  int64_t dim = 0;      // d
  int64_t hidden = 0;   // H
  int64_t buckets = 0;  // C
};

// One value a parameter, float32: the parameters themselves, their gradients, Adam's moments.
struct NetworkTensors {
  at::Tensor hidden_weight;  // [n, H, d]
  at::Tensor scale, shift;   // [n, H]: batch norm's gamma and beta
  at::Tensor output_weight;  // [n, C, H]
  at::Tensor output_bias;    // [n, C]
};

// Batch norm folded into the first layer, as a .sqz of kind qmodel stores it.
struct FoldedNetwork {
  at::Tensor hidden_weight, hidden_bias;  // [n, H, d], [n, H]
  at::Tensor output_weight, output_bias;  // [n, C, H], [n, C]
};

struct Network {
  NetworkTensors parameters;
  NetworkTensors first, second;  // Adam's moments
  at::Tensor mean, variance;     // [n, H]: batch norm's running statistics
  int64_t step = 0;              // updates made
};

// Random weights, the same for a seed on every device; zero moments.
Network make_network(const NetworkShape& shape, uint64_t seed, at::Device device);

struct NetworkBatch {
  at::Tensor queries;    // [n, B, d], before RoPE
  at::Tensor masses;     // [n, B, C], rows sum to 1
  at::Tensor log_sizes;  // [n, B, C], as log_sizes() makes them; masses are 0 where no key is
  at::Tensor weights;    // [n, B]: 1, or 0 for a row that counts for nothing
};

// Logs of numbers of keys. That of none is finite, so that no mass times it is none.
at::Tensor log_sizes(const at::Tensor& sizes);

struct NetworkGradient {
  NetworkTensors of;
  at::Tensor loss;            // [n]: mean KL divergence of each head's rows, in nats
  at::Tensor mean, variance;  // [n, H] of the batch
};
NetworkGradient gradient(const NetworkTensors& parameters, const NetworkBatch& batch);

// One step of Adam (beta 0.9 and 0.999); the running statistics follow the batch's.
void update(Network& network, const NetworkGradient& gradient, double learning_rate);

FoldedNetwork fold(const Network& network);

// Logits of every bucket: queries [n, B, d] -> [n, B, C].
at::Tensor bucket_logits(const FoldedNetwork& network, const at::Tensor& queries);
// The same by the network as it is trained, with the running statistics.
at::Tensor bucket_logits(const Network& network, const at::Tensor& queries);

// a [n, x, y] times b [n, y, z]; on the CPU the heads are shared out over the threads.
at::Tensor head_products(const at::Tensor& a, const at::Tensor& b);

}  // namespace sqz::training
