// LibTorch's attention beside ours. Built without LibTorch, there are no contenders.
#pragma once

#include <string>
#include <vector>

#include "tools/sqz_bench/attention_fixture.h"

namespace sqz::bench {

// "2.11.0", or "" without LibTorch.
std::string torch_version();

// Dense attention of the fixture's queries to all keys of its layer (slots and exact keys), once
// per dtype of options.torch_dtype: "torch bmm" is two matrix products with a softmax between them,
// "torch sdpa" scaled_dot_product_attention (from LibTorch 2 on). The heads of a group are rows of
// one product, so that keys are not repeated. One set of queries a round, in turn. Keys and values
// are copied.
std::vector<Contender> torch_contenders(const Options& options, const Fixture& fixture);

}  // namespace sqz::bench
