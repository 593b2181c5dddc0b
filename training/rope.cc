#include "training/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sqz::training {
namespace {

constexpr double kTwoPi = 2 * std::numbers::pi;

// Llama 3.1: long wavelengths are stretched, short ones kept, those between blended.
void scale_llama3(const RopeDescription& rope, std::vector<float>& frequencies) {
  const auto factor = static_cast<float>(rope.factor);
  const auto original = static_cast<float>(rope.original_max_positions);
  const auto low = static_cast<float>(rope.low_freq_factor);
  const auto high = static_cast<float>(rope.high_freq_factor);
  for (float& f : frequencies) {
    const float wavelength = static_cast<float>(kTwoPi) / f;
    if (wavelength < original / high) continue;
    if (wavelength > original / low) {
      f /= factor;
      continue;
    }
    const float smooth = (original / wavelength - low) / (high - low);
    f = (1 - smooth) * f / factor + smooth * f;
  }
}

// YaRN (paper section 3.2): dimensions that turn often are kept, those that turn less than once
// are interpolated, with a linear ramp between.
void scale_yarn(const RopeDescription& rope, int64_t head_dim, std::vector<float>& frequencies) {
  const auto dim = static_cast<double>(head_dim);
  const auto dimension_of = [&](double rotations) {
    const auto original = static_cast<double>(rope.original_max_positions);
    return dim * std::log(original / (rotations * kTwoPi)) / (2 * std::log(rope.theta));
  };
  double low = dimension_of(rope.beta_fast), high = dimension_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, dim - 1);
  if (low == high) high += 0.001;
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const double ramp = (static_cast<double>(i) - low) / (high - low);
    const auto keep = static_cast<float>(1.0 - std::clamp(ramp, 0.0, 1.0));
    const float interpolated = frequencies[i] / static_cast<float>(rope.factor);
    frequencies[i] = interpolated * (1 - keep) + frequencies[i] * keep;
  }
}

}  // namespace

std::vector<float> rope_frequencies(const RopeDescription& rope, int64_t head_dim) {
  std::vector<float> frequencies(static_cast<size_t>(head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    frequencies[i] = 1.0f / static_cast<float>(std::pow(rope.theta, double{exponent}));
  }
  switch (rope.kind) {
    case RopeDescription::Kind::kDefault:
      break;
    case RopeDescription::Kind::kLinear:
      for (float& f : frequencies) f /= static_cast<float>(rope.factor);
      break;
    case RopeDescription::Kind::kLlama3:
      scale_llama3(rope, frequencies);
      break;
    case RopeDescription::Kind::kYarn:
      scale_yarn(rope, head_dim, frequencies);
      break;
  }
  return frequencies;
}

RopeTable rope_table(const RopeDescription& rope, int64_t head_dim, int64_t first, int64_t count) {
  std::vector<float> frequencies = rope_frequencies(rope, head_dim);
  const at::Tensor f = at::from_blob(frequencies.data(), {1, 1, head_dim / 2}, at::kFloat);
  const at::Tensor positions = at::arange(first, first + count, at::kLong).to(at::kFloat);
  const at::Tensor angles = positions.view({count, 1, 1}) * f;
  const double factor = rope.kind == RopeDescription::Kind::kYarn ? rope.attention_factor : 1.0;
  return {at::cos(angles).mul_(factor), at::sin(angles).mul_(factor)};
}

at::Tensor apply_rope(const at::Tensor& x, const RopeTable& table) {
  const at::Tensor x32 = x.to(at::kFloat);
  const int64_t half = x.size(2) / 2;
  const at::Tensor a = x32.narrow(2, 0, half), b = x32.narrow(2, half, half);
  at::Tensor out = at::empty_like(x32);
  at::Tensor left = out.narrow(2, 0, half), right = out.narrow(2, half, half);
  at::mul_out(left, a, table.cos).sub_(b * table.sin);
  at::mul_out(right, b, table.cos).add_(a * table.sin);
  return out.to(x.scalar_type());
}

}  // namespace sqz::training
