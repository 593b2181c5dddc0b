#include "tools/sqz_bench/attention_fixture.h"
#include "tools/sqz_bench/machine.h"

#include <torch/version.h>

#include <memory>

#include "training/aten.h"

// After aten.h:
#include <ATen/Parallel.h>
#include <c10/core/GradMode.h>

namespace sqz::bench {
namespace {

struct Inputs {
  at::Tensor keys, values;          // [Hkv, N, d]
  std::vector<at::Tensor> queries;  // a set each: [Hkv, group * tokens, d]
  double scale = 0;

  const at::Tensor& query(int64_t round) const {
    return queries[static_cast<size_t>(round) % queries.size()];
  }
};

at::ScalarType scalar_type(DType dtype) {
  return dtype == DType::kBF16 ? at::kBFloat16 : at::kHalf;
}

// [Hkv, M + E, d]: slots, then exact keys. Order does not matter to dense attention.
at::Tensor all_rows(const LayerView& layer, const void* slots, const void* exact,
                    at::ScalarType to) {
  const auto view = [&](const void* data, int64_t count) {
    return at::from_blob(const_cast<void*>(data), {layer.kv_heads, count, layer.head_dim},
                         scalar_type(layer.dtype));
  };
  return at::cat({view(slots, layer.slots), view(exact, layer.exact)}, 1).to(to).contiguous();
}

std::shared_ptr<const Inputs> make_inputs(const Fixture& fixture, at::ScalarType dtype) {
  const LayerView& layer = fixture.layer();
  const ModelDescription& model = fixture.served->metadata().model;
  const int64_t dim = layer.head_dim, group = model.group_size(), tokens = fixture.tokens;
  auto inputs = std::make_shared<Inputs>();
  inputs->keys = all_rows(layer, layer.keys, layer.exact_keys, dtype);
  inputs->values = all_rows(layer, layer.values, layer.exact_values, dtype);
  inputs->scale = model.attention_scale;
  for (const std::vector<float>& q : fixture.exact_queries) {
    inputs->queries.push_back(at::from_blob(const_cast<float*>(q.data()),
                                            {tokens, layer.kv_heads, group, dim}, at::kFloat)
                                  .permute({1, 2, 0, 3})
                                  .reshape({layer.kv_heads, group * tokens, dim})
                                  .to(dtype)
                                  .contiguous());
  }
  return inputs;
}

at::Tensor bmm_attention(const Inputs& in, int64_t round) {
  const at::Tensor scores = at::bmm(in.query(round), in.keys.transpose(1, 2)).mul_(in.scale);
  return at::bmm(at::softmax(scores, -1), in.values);
}

#if TORCH_VERSION_MAJOR >= 2
at::Tensor sdpa_attention(const Inputs& in, int64_t round) {
  return at::scaled_dot_product_attention(in.query(round).unsqueeze(0), in.keys.unsqueeze(0),
                                          in.values.unsqueeze(0));
}
#endif

}  // namespace

std::string torch_version() {
  return TORCH_VERSION;
}

std::vector<Contender> torch_contenders(const Options& options, const Fixture& fixture) {
  at::set_num_threads(options.threads);
  std::vector<Contender> contenders;
  for (const auto& [name, dtype] :
       {std::pair("f32", at::kFloat), std::pair("bf16", at::kBFloat16)}) {
    if (options.torch_dtype.find(name) == std::string::npos) continue;
    const auto inputs = make_inputs(fixture, dtype);
    const double bytes = static_cast<double>(inputs->keys.nbytes() + inputs->values.nbytes());
    const auto add = [&, name = name](const char* kind, auto attention) {
      const auto run = [inputs, attention](int64_t round) {
        const c10::NoGradGuard no_grad;
        attention(*inputs, round);
        return Status();
      };
      contenders.push_back({.name = concat("torch ", kind, " ", name),
                            .run = run,
                            .bytes = bytes,
                            .flop = fixture.dense_flop()});
    };
    add("bmm", bmm_attention);
#if TORCH_VERSION_MAJOR >= 2
    add("sdpa", sdpa_attention);
#endif
  }
  return contenders;
}

}  // namespace sqz::bench
