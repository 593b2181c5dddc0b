// LibTorch's attention beside ours. Built without LibTorch, there are no contenders.
#pragma once

#include <string>
#include <vector>

#include "formats/sqz_file.h"
#include "tools/sqz_bench/measure.h"
#include "tools/sqz_bench/options.h"

namespace sqz::bench {

// "2.11.0", or "" without LibTorch.
std::string torch_version();

// Dense attention of `tokens` query tokens over all keys of the layer (slots and exact keys), once
// per dtype of options.torch_dtype: "torch bmm" is two matrix products with a softmax between them,
// "torch sdpa" scaled_dot_product_attention (from LibTorch 2 on). The heads of a group are rows of
// one product, so that keys are not repeated. queries: [tokens, Hq, d], one set a round, in turn.
// `flop` is of one call. Keys and values are copied.
std::vector<Contender> torch_contenders(const Options& options, const LayerView& layer,
                                        const std::vector<std::vector<float>>& queries,
                                        int64_t tokens, double scale, double flop);

}  // namespace sqz::bench
