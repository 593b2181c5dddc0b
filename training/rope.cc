#include "training/rope.h"

#include "training/linear.h"

namespace sqz::training {

RopeTable rope_table(const RopeDescription& rope, int64_t head_dim, int64_t first, int64_t count) {
  std::vector<float> frequencies = rope_frequencies(rope, head_dim);
  const at::Tensor f = at::from_blob(frequencies.data(), {1, 1, head_dim / 2}, at::kFloat);
  const at::Tensor positions = at::arange(first, first + count, at::kLong).to(at::kFloat);
  const at::Tensor angles = positions.view({count, 1, 1}) * f;
  const double factor = rope.kind == RopeDescription::Kind::kYarn ? rope.attention_factor : 1.0;
  return {by_rows(angles, at::cos_out).mul_(factor), by_rows(angles, at::sin_out).mul_(factor)};
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
