// LibTorch's tensors. Include this, never <ATen/ATen.h>: in C++20, clang with libstdc++ rejects
// LibTorch 1.13's headers unless c10::IValue is complete before c10::List is defined.
#pragma once

#include <ATen/core/ivalue.h>

// After IValue:
#include <ATen/ATen.h>
