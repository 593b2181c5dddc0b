#include "training/qmodel_windows.h"

#include <algorithm>
#include <numeric>
#include <random>

namespace sqz::training {
namespace {

// std::shuffle's draws are the library's choice; these are ours.
uint64_t below(std::mt19937_64& random, uint64_t bound) {
  return random() % bound;
}

Status check_finite(const WindowLayer& layer, const std::string& window, int64_t number) {
  for (const auto& [what, rows] :
       {std::pair("keys", &layer.roped_keys), std::pair("queries", &layer.roped_queries)}) {
    if (rows->isfinite().all().item<bool>()) continue;
    return {Code::kNumeric, bad_field(window, concat(what, " of layer ", number), "NaN or infinity",
                                      "finite numbers")};
  }
  return {};
}

}  // namespace

std::vector<TokenText> cut_windows(std::span<const TokenText> texts, const QmodelOptions& options) {
  const int32_t first = options.first_token;
  const auto full = static_cast<size_t>(options.window);
  std::vector<TokenText> out;
  for (const TokenText& text : texts) {
    std::span<const int32_t> rest(text.tokens);
    if (first >= 0 && !rest.empty() && rest.front() == first) rest = rest.subspan(1);
    const size_t room = full - (first >= 0 ? 1 : 0);
    while (2 * rest.size() >= full) {
      const auto part = rest.first(std::min(room, rest.size()));
      TokenText window{text.name, {}};
      if (first >= 0) window.tokens.push_back(first);
      window.tokens.insert(window.tokens.end(), part.begin(), part.end());
      out.push_back(std::move(window));
      rest = rest.subspan(part.size());
    }
  }
  return out;
}

std::vector<int64_t> shuffled(int64_t count, uint64_t seed) {
  std::vector<int64_t> out(static_cast<size_t>(count));
  std::iota(out.begin(), out.end(), int64_t{0});
  std::mt19937_64 random(seed);
  for (size_t i = out.size(); i > 1; --i) std::swap(out[i - 1], out[below(random, i)]);
  return out;
}

std::vector<int64_t> draw_positions(int64_t first, int64_t tokens, int64_t most, uint64_t seed) {
  std::vector<int64_t> out = shuffled(std::max<int64_t>(tokens - first, 0), seed);
  out.resize(std::min(out.size(), static_cast<size_t>(most)));
  for (int64_t& position : out) position += first;
  std::sort(out.begin(), out.end());
  return out;
}

Status run_window(Runner& runner, const TokenText& window, const WindowPass& pass,
                  const std::function<Status(int64_t, const WindowLayer&)>& body) {
  const ModelDescription& model = runner.config().description;
  const RopeTable host =
      rope_table(model.rope, model.head_dim, 0, static_cast<int64_t>(window.tokens.size()));
  const RopeTable rope = {host.cos.to(pass.device), host.sin.to(pass.device)};
  PrefillOptions options;
  options.pre_rope = true;
  options.on_device = true;  // keys after RoPE are made from those before
  options.query_positions = pass.positions;
  options.progress = pass.progress;
  options.consumer = [&](const LayerCapture& capture) -> Status {
    const auto at = std::lower_bound(pass.layers.begin(), pass.layers.end(), capture.layer);
    if (at != pass.layers.end() && *at == capture.layer) {
      const WindowLayer layer = window_layer(capture, model, pass.positions, rope, pass.device);
      SQZ_RETURN_IF_ERROR(check_finite(layer, window.name, capture.layer));
      SQZ_RETURN_IF_ERROR(body(at - pass.layers.begin(), layer));
    }
    return {};
  };
  return runner.prefill(window.tokens, options).status();
}

}  // namespace sqz::training
