#pragma once

#include "training/aten.h"

#include <ATen/CPUGeneratorImpl.h>

namespace sqz::training {

// Numbers of N(0, 1), always the same for a seed.
inline at::Tensor random(at::IntArrayRef shape, uint64_t seed) {
  at::Generator generator = at::make_generator<at::CPUGeneratorImpl>(seed);
  return at::randn(shape, generator, at::kFloat);
}

}  // namespace sqz::training
