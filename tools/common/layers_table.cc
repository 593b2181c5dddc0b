#include "tools/common/layers_table.h"

#include <algorithm>
#include <cmath>

namespace sqz {
namespace {

constexpr double kWidestBar = 40;

}  // namespace

JsonMembers layers_json(const LayersFile& layers) {
  JsonMembers out = {{"producer", layers.producer},
                     {"fingerprint", fingerprint(layers.model)},
                     {"tokenizer_hash", layers.tokenizer_hash},
                     {"layers", layers.model.layers},
                     {"texts", layers.texts},
                     {"windows", layers.windows},
                     {"window", layers.window},
                     {"tokens", layers.tokens},
                     {"allocation", layers.allocation},
                     {"context", layers.context},
                     {"uniform_budget", layers.uniform_budget},
                     {"p", layers.p},
                     {"cosine", layers.cosine},
                     {"cosine_error", layers.cosine_error},
                     {"group", layers.group},
                     {"budget", layers.budget}};
  if (!layers.measured.is_null()) out["measured"] = layers.measured;
  return out;
}

Rows layers_rows(const LayersFile& layers) {
  const ModelDescription& model = layers.model;
  return {{"model", concat(model.architecture, ", ", model.layers, " layers")},
          {"fingerprint", fingerprint(model)},
          {"profiled",
           concat(layers.tokens, " tokens, ", layers.windows, " windows of up to ", layers.window,
                  ", ", layers.texts, layers.texts == 1 ? " text" : " texts")},
          {"budget", concat(layers.uniform_budget, " of ", layers.context,
                            " tokens a layer on average, group 2 keeps ", layers.p, " of it")},
          {"producer", layers.producer}};
}

std::string layers_table(const LayersFile& layers) {
  const double least = *std::min_element(layers.cosine.begin(), layers.cosine.end());
  std::string out = "layer   cosine            group    budget  1 - cosine\n";
  for (size_t l = 0; l < layers.cosine.size(); ++l) {
    const double share = least < 1 ? (1 - layers.cosine[l]) / (1 - least) : 0;
    out +=
        printed("%5zu  %7.4f +- %.4f     %d  %9lld  ", l, layers.cosine[l], layers.cosine_error[l],
                layers.group[l], static_cast<long long>(layers.budget[l]));
    out += std::string(static_cast<size_t>(std::lround(kWidestBar * share)), '#') + "\n";
  }
  return out;
}

}  // namespace sqz
