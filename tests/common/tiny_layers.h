// A small, valid layer profile for tests.
#pragma once

#include "formats/base/hash.h"
#include "formats/layers_file.h"
#include "tests/common/tiny_model.h"

namespace sqz::testing {

inline LayersFile four_layers() {
  LayersFile f;
  f.model = tiny_model(4, 4, 2, 8);
  f.tokenizer_hash = hex(uint64_t{2});
  f.texts = 2;
  f.windows = 3;
  f.window = 500;
  f.tokens = 1234;
  f.context = 1000;
  f.uniform_budget = 100;
  f.p = 0.3;
  f.cosine = {0.4, 0.95, 0.875, 0.9625};
  f.cosine_error = {0.01, 0.0, 0.002, 1.0 / 3};
  f.group = {0, 2, 1, 2};
  f.budget = {170, 30, 170, 30};
  return f;
}

}  // namespace sqz::testing
