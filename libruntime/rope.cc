#include "libruntime/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace sqz {
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

// YaRN (paper section 3.2): dimensions that turn often are kept, dimensions that turn less than
// once are interpolated, with a linear ramp between.
void scale_yarn(const RopeDescription& rope, int64_t head_dim, std::vector<float>& frequencies) {
  const auto dim = static_cast<double>(head_dim);  // the turned part
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
  if (rope.rotary_dim >= 0) head_dim = rope.rotary_dim;
  std::vector<float> frequencies(static_cast<size_t>(head_dim / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(head_dim);
    frequencies[i] = 1.0f / static_cast<float>(std::pow(rope.theta, double{exponent}));
  }
  switch (rope.kind) {
    case RopeDescription::Kind::kDefault:
    case RopeDescription::Kind::kOther:
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

RopeUndo::RopeUndo(const RopeDescription& rope, int64_t head_dim)
    : dim_(head_dim),
      frequencies_(rope_frequencies(rope, head_dim)),
      shrink_(rope.kind == RopeDescription::Kind::kYarn
                  ? 1 / static_cast<float>(rope.attention_factor)
                  : 1) {}

RopeUndo RopeUndo::shift(const RopeDescription& rope, int64_t head_dim) {
  RopeUndo out(rope, head_dim);
  out.shrink_ = 1;
  return out;
}

void RopeUndo::angles(int64_t position, float* cosines, float* sines) const {
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    const float angle = static_cast<float>(position) * frequencies_[i];
    cosines[i] = std::cos(angle) * shrink_;
    sines[i] = std::sin(angle) * shrink_;
  }
}

void RopeUndo::apply(int64_t position, const float* rows, int64_t count, float* workspace,
                     float* out) const {
  const auto half = static_cast<int64_t>(frequencies_.size());
  float* const cosines = workspace;
  float* const sines = workspace + half;
  angles(position, cosines, sines);
  for (int64_t row = 0; row < count; ++row) {
    const float* in = rows + row * dim_;
    float* to = out + row * dim_;
    for (int64_t i = 0; i < half; ++i) {
      const float a = in[i], b = in[half + i];
      to[i] = a * cosines[i] + b * sines[i];
      to[half + i] = b * cosines[i] - a * sines[i];
    }
    for (int64_t i = 2 * half; i < dim_; ++i) to[i] = in[i];
  }
}

}  // namespace sqz
