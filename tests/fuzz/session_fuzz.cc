// Any bytes as an index, from opening it to attention: every selector, with settings from the
// input. Whatever the library says, it is not that it has a bug.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "sqz/sqz.hpp"
#include "tests/common/temporary_directory.h"
#include "tests/fuzz/sqz_input.h"

namespace {

using sqz::runtime::make;

// Checks the status of a call; true if it succeeded.
bool ok(sqz_status status) {
  if (status == SQZ_INTERNAL || status == SQZ_IO) {
    std::fprintf(stderr, "%s\n", sqz_last_error());
    std::abort();
  }
  return status == SQZ_OK;
}

// A call with `tokens` queries for a layer. last_head: the session serves the last KV head of
// `info`.
void attend(sqz_session* session, const sqz_index* index, const sqz_index_info& info,
            int64_t number, int64_t tokens, bool last_head) {
  auto layer = make<sqz_layer_info>();
  (void)ok(sqz_index_describe_layer(index, number, &layer));
  for (int64_t i = 0; i < layer.states; ++i) {
    const char* name = nullptr;
    sqz_tensor state = {};
    (void)ok(sqz_index_state(index, number, i, &name, &state));
  }
  if (last_head) {
    layer.query_heads /= info.kv_heads;
    layer.kv_heads /= info.kv_heads;
  }
  const int64_t heads = layer.query_heads * tokens, dim = std::max(layer.head_dim, layer.value_dim);
  if (heads > (1 << 16) / std::max<int64_t>(dim, 1)) return;
  std::vector<float> q(static_cast<size_t>(heads * layer.head_dim));
  const auto numbers = static_cast<size_t>(heads * layer.value_dim);
  const std::unique_ptr<float[]> out(new float[numbers]);  // uninitialised, and so seen by MSan
  for (size_t i = 0; i < q.size(); ++i) q[i] = std::sin(static_cast<float>(i));
  std::vector<float> lse(static_cast<size_t>(heads));
  std::vector<int64_t> positions(static_cast<size_t>(tokens), info.tokens);
  int64_t shape[] = {tokens, layer.query_heads, layer.head_dim}, lse_shape[] = {tokens, shape[1]};
  int64_t out_shape[] = {tokens, layer.query_heads, layer.value_dim};
  sqz_tensor q_tensor = sqz::runtime::f32_tensor(q.data(), shape, 3), out_tensor = q_tensor;
  sqz_tensor lse_tensor = sqz::runtime::f32_tensor(lse.data(), lse_shape, 2);
  out_tensor.data = out.get();
  out_tensor.shape = out_shape;
  auto args = make<sqz_attend_args>();
  args.q = &q_tensor;
  args.out = &out_tensor;
  args.lse = &lse_tensor;
  args.positions = positions.data();
  std::vector<int64_t> indptr(static_cast<size_t>(layer.kv_heads) + 1);
  std::vector<sqz_run> runs(64);
  int64_t count = 0;
  args.layer = number;
  (void)ok(sqz_select(session, &args, runs.data(), std::ssize(runs), indptr.data(), &count));
  if (!ok(sqz_attend(session, &args))) return;
  for (size_t i = 0; i < numbers; ++i) {
    if (!std::isfinite(out[i])) std::abort();
  }
  auto stats = make<sqz_stats>();
  (void)ok(sqz_session_stats(session, 0, args.layer, &stats));
  if (stats.keys_read > stats.keys_possible) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const sqz::SqzInput input({data, size});
  const auto [how, amount, rule, unused, spare, levels, tokens, block] = input.settings;
  static const sqz::testing::TemporaryDirectory directory;
  const std::string path = directory.file("x.sqz");
  sqz::testing::write_file(path,
                           {reinterpret_cast<const char*>(input.file.data()), input.file.size()});
  if (std::filesystem::file_size(path) != input.file.size()) std::abort();
  sqz_index* index = nullptr;
  const sqz_open_mode mode = how & 128 ? SQZ_OPEN_VERIFY : how & 1 ? SQZ_OPEN_MMAP : SQZ_OPEN_READ;
  if (!ok(sqz_index_open(path.c_str(), mode, &index))) {
    return 0;
  }
  auto info = make<sqz_index_info>();
  (void)ok(sqz_index_describe(index, &info));
  const double thresholds[] = {1.0 / amount, 2.0 / amount, 3.0 / amount, 4.0 / amount};
  auto options = make<sqz_session_options>();
  options.dense_layers = how & 8 ? 0 : -1;
  options.uniform_layers = how >> 4 & 1;
  options.levels = levels % 5;
  options.block = block % 4;
  options.threads = 1;
  options.max_tokens = 100;  // buffers of a size that tests/fuzz/msan.cc watches
  if (how & 32) options.first_kv_head = info.kv_heads - 1;
  // The index's own selector comes twice: by thresholds, and by the rule `budget`.
  for (int n = 0; sqz_selector_name(static_cast<sqz_selector>(std::max(n - 1, 0))); ++n) {
    const int selector = std::max(n - 1, 0);
    options.selector = selector;
    options.rule = n == 0 || rule % 2 ? SQZ_RULE_BUDGET : SQZ_RULE_THRESHOLD;
    const bool dense = selector == SQZ_SELECTOR_DENSE, exact = how & 4;
    const double share = ((amount + 127) % 256 + 1) / 256.0;
    options.budget = dense || exact || !(how & 2) ? 0 : share;
    options.keep = dense || exact || (how & 2) ? 0 : share;
    options.thresholds = dense || !exact ? nullptr : thresholds;
    sqz_session* session = nullptr;
    if (!ok(sqz_session_create(index, &options, &session))) continue;
    for (int64_t layer = 0; layer < std::min<int64_t>(info.layers, 5); ++layer) {
      attend(session, index, info, layer, 1 + tokens % 4, how & 32);
    }
    sqz_session_destroy(session);
  }
  sqz_index_close(index);
  return 0;
}
