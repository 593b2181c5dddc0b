#include "training/profile.h"

#include <algorithm>
#include <cmath>

namespace sqz {
namespace {

struct Window {
  const TokenText* text;
  std::span<const int32_t> tokens;
};

struct Block {
  double mean = 0, tokens = 0;
};

std::vector<Window> cut(std::span<const TokenText> texts, const ProfileOptions& options) {
  std::vector<Window> out;
  for (const TokenText& text : texts) {
    std::span<const int32_t> rest(text.tokens);
    for (int64_t i = 0; !rest.empty() && (options.windows == 0 || i < options.windows); ++i) {
      const size_t length = std::min(rest.size(), static_cast<size_t>(options.window));
      out.push_back({&text, rest.first(length)});
      rest = rest.subspan(length);
    }
  }
  return out;
}

Status add_blocks(const LayerCapture& capture, const std::string& text,
                  std::vector<Block>& blocks) {
  const std::span<const float> cosine = capture.cosine;
  for (size_t first = 0; first < cosine.size(); first += kProfileBlock) {
    const size_t end = std::min(cosine.size(), first + static_cast<size_t>(kProfileBlock));
    double sum = 0;
    for (size_t i = first; i < end; ++i) {
      if (!std::isfinite(cosine[i])) {
        return {Code::kNumeric,
                bad_field(text, concat("cosine of layer ", capture.layer, " at token ", i),
                          concat(cosine[i]), "a number: the hidden states are not finite")};
      }
      sum += double{cosine[i]};
    }
    const auto tokens = static_cast<double>(end - first);
    blocks.push_back({sum / tokens, tokens});
  }
  return {};
}

void summarise(std::span<const Block> blocks, LayersFile& profile) {
  double tokens = 0, mean = 0, spread = 0;
  for (const Block& block : blocks) tokens += block.tokens;
  for (const Block& block : blocks) mean += block.tokens / tokens * block.mean;
  for (const Block& block : blocks) {
    spread += std::pow(block.tokens / tokens * (block.mean - mean), 2);
  }
  const auto count = static_cast<double>(blocks.size());
  // Rounding removes the difference that float32 makes between equal layers; 1 is the most.
  const double rounded = std::round(mean / kProfileStep) * kProfileStep;
  profile.cosine.push_back(std::clamp(rounded, -1.0, 1.0));
  profile.cosine_error.push_back(std::sqrt(spread * count / (count - 1)));
}

}  // namespace

Result<LayersFile> profile_layers(Runner& runner, std::span<const TokenText> texts,
                                  const ProfileOptions& options) {
  const std::vector<Window> windows = cut(texts, options);
  LayersFile profile;
  profile.model = runner.config().description;
  profile.texts = std::ssize(texts);
  profile.window = options.window;
  for (const Window& window : windows) profile.tokens += std::ssize(window.tokens);
  profile.windows = std::ssize(windows);
  if (profile.tokens < 2 * kProfileBlock) {
    return Status(Code::kCorrupt,
                  bad_field(texts.empty() ? "texts" : texts.front().name, "text",
                            concat(profile.tokens, " tokens"),
                            concat("at least ", 2 * kProfileBlock, ": two blocks of ",
                                   kProfileBlock, ", to tell a standard error from")));
  }

  const int64_t layers = profile.model.layers;
  std::vector<std::vector<Block>> blocks(static_cast<size_t>(layers));
  int64_t before = 0;  // tokens of the windows that are done
  for (size_t i = 0; i < windows.size(); ++i) {
    const Window& window = windows[i];
    PrefillOptions pass;
    pass.cosine = true;
    pass.on_device = !options.consumer;  // keys and values are of no interest here
    pass.attention = options.consumer && options.attention;
    const auto count = std::ssize(window.tokens);
    for (int64_t t = std::max<int64_t>(0, count - options.tail_queries); t < count; ++t) {
      pass.query_positions.push_back(t);
    }
    pass.consumer = [&](const LayerCapture& capture) -> Status {
      SQZ_RETURN_IF_ERROR(
          add_blocks(capture, window.text->name, blocks[static_cast<size_t>(capture.layer)]));
      if (options.consumer) {
        SQZ_RETURN_IF_ERROR(options.consumer(static_cast<int64_t>(i), capture));
      }
      const double part = static_cast<double>(capture.layer + 1) / static_cast<double>(layers);
      options.progress(
          (static_cast<double>(before) + part * static_cast<double>(window.tokens.size())) /
          static_cast<double>(profile.tokens));
      return {};
    };
    SQZ_RETURN_IF_ERROR(runner.prefill(window.tokens, pass));
    before += std::ssize(window.tokens);
  }
  for (const auto& layer : blocks) summarise(layer, profile);
  return profile;
}

}  // namespace sqz
