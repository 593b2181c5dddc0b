#include "training/qmodel_network.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/optim/adam.h>

#include <cmath>

namespace sqz::training {
namespace {

constexpr double kNormEpsilon = 1e-5;
constexpr double kLogOfNone = -1e4;  // its exponential is 0; float16 has it
constexpr double kMomentum = 0.01;   // of the running statistics: a mean over some hundred batches

at::Tensor products(const at::Tensor& a, const at::Tensor& b) {
  if (!a.device().is_cpu()) return at::bmm(a, b);
  at::Tensor out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options());
  const bool inference = c10::InferenceMode::is_enabled();
  at::parallel_for(0, a.size(0), 1, [&](int64_t begin, int64_t end) {
    const c10::InferenceMode same(inference);  // both guards are of the thread
    const at::NoGradGuard no_gradients;
    for (int64_t head = begin; head < end; ++head) {
      at::Tensor part = out.select(0, head);
      at::mm_out(part, a.select(0, head), b.select(0, head));
    }
  });
  return out;
}

struct HeadProducts : torch::autograd::Function<HeadProducts> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& a,
                            const at::Tensor& b) {
    context->save_for_backward({a, b});
    return products(a, b);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& slope) {
    const auto saved = context->get_saved_variables();
    return {products(slope[0], saved[1].transpose(1, 2)),
            products(saved[0].transpose(1, 2), slope[0])};
  }
};

}  // namespace

at::Tensor head_products(const at::Tensor& a, const at::Tensor& b) {
  return a.requires_grad() || b.requires_grad() ? HeadProducts::apply(a, b) : products(a, b);
}

at::Tensor log_sizes(const at::Tensor& sizes) {
  return sizes.log().clamp_min_(kLogOfNone);
}

at::Tensor divergence(const at::Tensor& logits, const NetworkBatch& batch) {
  const at::Tensor log_shares = at::log_softmax(logits + batch.log_sizes, 2);
  const at::Tensor logs = batch.masses.clamp_min(1e-30).log();  // 0 log 0 = 0
  const at::Tensor rows = (batch.masses * (logs - log_shares)).sum(2);
  return (rows * batch.weights).sum(1) / batch.weights.sum(1).clamp_min(1);
}

Network::Network(const NetworkShape& s, uint64_t seed, at::Device device) {
  const c10::InferenceMode off(false);
  at::Generator random = at::make_generator<at::CPUGeneratorImpl>(seed);
  const auto normal = [&](at::IntArrayRef shape, double deviation) {
    return at::randn(shape, random, at::kFloat).mul_(deviation).to(device);
  };
  const at::TensorOptions options = at::TensorOptions(at::kFloat).device(device);
  // Batch norm undoes any scale of the first weights; the second start near uniform logits.
  hidden_weight_ = normal({s.heads, s.hidden, s.dim}, 1 / std::sqrt(s.dim));
  scale_ = at::ones({s.heads, s.hidden}, options);
  shift_ = at::zeros({s.heads, s.hidden}, options);
  output_weight_ = normal({s.heads, s.buckets, s.hidden}, 1 / std::sqrt(s.hidden));
  output_bias_ = at::zeros({s.heads, s.buckets}, options);
  mean_ = at::zeros({s.heads, s.hidden}, options);
  variance_ = at::ones({s.heads, s.hidden}, options);
  std::vector<at::Tensor> parameters = {hidden_weight_, scale_, shift_, output_weight_,
                                        output_bias_};
  for (at::Tensor& parameter : parameters) parameter.requires_grad_();
  adam_ = std::make_unique<torch::optim::Adam>(parameters);
}

Network::~Network() = default;

at::Tensor Network::train(const NetworkBatch& batch, double learning_rate) {
  const c10::InferenceMode off(false);
  ++steps_;
  const at::Tensor raw = head_products(batch.queries, hidden_weight_.transpose(1, 2));
  const at::Tensor mean = raw.mean(1), variance = raw.var(1, false);
  const at::Tensor centred =
      (raw - mean.unsqueeze(1)) * (variance + kNormEpsilon).rsqrt().unsqueeze(1);
  const at::Tensor hidden = (centred * scale_.unsqueeze(1) + shift_.unsqueeze(1)).relu();
  const at::Tensor logits =
      head_products(hidden, output_weight_.transpose(1, 2)) + output_bias_.unsqueeze(1);
  const at::Tensor loss = divergence(logits, batch);

  adam_->zero_grad();
  loss.sum().backward();
  static_cast<torch::optim::AdamOptions&>(adam_->param_groups()[0].options()).lr(learning_rate);
  adam_->step();
  // The first batches replace the initial statistics outright.
  const double momentum = std::max(kMomentum, 1 / static_cast<double>(steps_));
  mean_.lerp_(mean.detach(), momentum);
  variance_.lerp_(variance.detach(), momentum);
  return loss.detach();
}

FoldedNetwork Network::fold() const {
  const at::Tensor factor = scale_.detach() * (variance_ + kNormEpsilon).rsqrt();
  return {hidden_weight_.detach() * factor.unsqueeze(2), shift_.detach() - mean_ * factor,
          output_weight_.detach().clone(), output_bias_.detach().clone()};
}

at::Tensor bucket_logits(const FoldedNetwork& n, const at::Tensor& queries) {
  at::Tensor hidden = head_products(queries, n.hidden_weight.transpose(1, 2));
  hidden.add_(n.hidden_bias.unsqueeze(1)).relu_();
  return head_products(hidden, n.output_weight.transpose(1, 2)).add_(n.output_bias.unsqueeze(1));
}

}  // namespace sqz::training
