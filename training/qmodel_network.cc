#include "training/qmodel_network.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <cmath>

namespace sqz::training {
namespace {

constexpr double kBeta1 = 0.9, kBeta2 = 0.999, kAdamEpsilon = 1e-8;
constexpr double kNormEpsilon = 1e-5;
constexpr double kLogOfNone = -1e4;  // its exponential is 0; float16 has it
constexpr double kMomentum = 0.01;   // of the running statistics: a mean over some hundred batches

// What the layers see on the way to the logits.
struct Activations {
  at::Tensor centred;  // [n, B, H] normalised, before scale and shift
  at::Tensor inverse;  // [n, 1, H] 1 / standard deviation
  at::Tensor hidden;   // [n, B, H] after ReLU
  at::Tensor logits;   // [n, B, C]
};

Activations forward(const NetworkTensors& p, const at::Tensor& raw, const at::Tensor& mean,
                    const at::Tensor& variance) {
  Activations a;
  a.inverse = (variance + kNormEpsilon).rsqrt().unsqueeze(1);
  a.centred = (raw - mean.unsqueeze(1)) * a.inverse;
  a.hidden = (a.centred * p.scale.unsqueeze(1) + p.shift.unsqueeze(1)).relu_();
  a.logits = head_products(a.hidden, p.output_weight.transpose(1, 2));
  a.logits.add_(p.output_bias.unsqueeze(1));
  return a;
}

NetworkTensors zeros_like(const NetworkTensors& t) {
  return {at::zeros_like(t.hidden_weight), at::zeros_like(t.scale), at::zeros_like(t.shift),
          at::zeros_like(t.output_weight), at::zeros_like(t.output_bias)};
}

}  // namespace

at::Tensor head_products(const at::Tensor& a, const at::Tensor& b) {
  if (!a.device().is_cpu()) return at::bmm(a, b);
  at::Tensor out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
  at::parallel_for(0, a.size(0), 1, [&](int64_t begin, int64_t end) {
    const c10::InferenceMode inference;  // thread-local
    for (int64_t head = begin; head < end; ++head) {
      at::Tensor part = out.select(0, head);
      at::mm_out(part, a.select(0, head), b.select(0, head));
    }
  });
  return out;
}

Network make_network(const NetworkShape& s, uint64_t seed, at::Device device) {
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto normal = [&](at::IntArrayRef shape, double deviation) {
    return at::randn(shape, random, at::kFloat).mul_(deviation).to(device);
  };
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(device);
  Network out;
  // Batch norm undoes any scale of the first weights; the second start near uniform logits.
  out.parameters.hidden_weight = normal({s.heads, s.hidden, s.dim}, 1 / std::sqrt(s.dim));
  out.parameters.scale = at::ones({s.heads, s.hidden}, options);
  out.parameters.shift = at::zeros({s.heads, s.hidden}, options);
  out.parameters.output_weight = normal({s.heads, s.buckets, s.hidden}, 1 / std::sqrt(s.hidden));
  out.parameters.output_bias = at::zeros({s.heads, s.buckets}, options);
  out.first = zeros_like(out.parameters);
  out.second = zeros_like(out.parameters);
  out.mean = at::zeros({s.heads, s.hidden}, options);
  out.variance = at::ones({s.heads, s.hidden}, options);
  return out;
}

at::Tensor log_sizes(const at::Tensor& sizes) {
  return sizes.log().clamp_min_(kLogOfNone);
}

NetworkGradient gradient(const NetworkTensors& p, const NetworkBatch& batch) {
  const auto rows = static_cast<double>(batch.queries.size(1));
  const at::Tensor raw = head_products(batch.queries, p.hidden_weight.transpose(1, 2));
  NetworkGradient out;
  out.mean = raw.mean(1);
  out.variance = raw.var(1, false);
  const Activations a = forward(p, raw, out.mean, out.variance);

  const at::Tensor log_shares = at::log_softmax(a.logits + batch.log_sizes, 2);
  const at::Tensor counted = batch.weights.sum(1).clamp_min(1);  // [n]
  // 0 log 0 = 0
  const at::Tensor entropy = (batch.masses * batch.masses.clamp_min(1e-30).log()).sum(2);
  const at::Tensor rows_loss = entropy - (batch.masses * log_shares).sum(2);
  out.loss = (rows_loss * batch.weights).sum(1) / counted;

  const at::Tensor share = (batch.weights / counted.unsqueeze(1)).unsqueeze(2);
  const at::Tensor d_logits = (log_shares.exp() - batch.masses).mul_(share);
  out.of.output_weight = head_products(d_logits.transpose(1, 2), a.hidden);
  out.of.output_bias = d_logits.sum(1);
  at::Tensor d_hidden = head_products(d_logits, p.output_weight);
  d_hidden.mul_(a.hidden > 0);
  out.of.scale = (d_hidden * a.centred).sum(1);
  out.of.shift = d_hidden.sum(1);
  // Through batch norm: mean and variance depend on every row.
  const at::Tensor scale = p.scale.unsqueeze(1) * a.inverse;
  const at::Tensor d_raw = scale * (d_hidden - out.of.shift.unsqueeze(1) / rows -
                                    a.centred * (out.of.scale.unsqueeze(1) / rows));
  out.of.hidden_weight = head_products(d_raw.transpose(1, 2), batch.queries);
  return out;
}

void update(Network& n, const NetworkGradient& g, double learning_rate) {
  ++n.step;
  const auto step = static_cast<double>(n.step);
  const double rate = learning_rate / (1 - std::pow(kBeta1, step));
  const double correction = 1 / std::sqrt(1 - std::pow(kBeta2, step));
  const auto adam = [&](at::Tensor& x, at::Tensor& first, at::Tensor& second,
                        const at::Tensor& slope) {
    first.mul_(kBeta1).add_(slope, 1 - kBeta1);
    second.mul_(kBeta2).addcmul_(slope, slope, 1 - kBeta2);
    x.addcdiv_(first, second.sqrt().mul_(correction).add_(kAdamEpsilon), -rate);
  };
  for (auto member :
       {&NetworkTensors::hidden_weight, &NetworkTensors::scale, &NetworkTensors::shift,
        &NetworkTensors::output_weight, &NetworkTensors::output_bias}) {
    adam(n.parameters.*member, n.first.*member, n.second.*member, g.of.*member);
  }
  // The first batches replace the initial statistics outright.
  const double momentum = std::max(kMomentum, 1 / step);
  n.mean.lerp_(g.mean, momentum);
  n.variance.lerp_(g.variance, momentum);
}

FoldedNetwork fold(const Network& n) {
  const NetworkTensors& p = n.parameters;
  const at::Tensor factor = p.scale * (n.variance + kNormEpsilon).rsqrt();
  return {p.hidden_weight * factor.unsqueeze(2), p.shift - n.mean * factor, p.output_weight.clone(),
          p.output_bias.clone()};
}

at::Tensor bucket_logits(const FoldedNetwork& n, const at::Tensor& queries) {
  at::Tensor hidden = head_products(queries, n.hidden_weight.transpose(1, 2));
  hidden.add_(n.hidden_bias.unsqueeze(1)).relu_();
  return head_products(hidden, n.output_weight.transpose(1, 2)).add_(n.output_bias.unsqueeze(1));
}

at::Tensor bucket_logits(const Network& n, const at::Tensor& queries) {
  const NetworkTensors& p = n.parameters;
  const at::Tensor raw = head_products(queries, p.hidden_weight.transpose(1, 2));
  return forward(p, raw, n.mean, n.variance).logits;
}

}  // namespace sqz::training
