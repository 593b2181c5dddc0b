#include "tools/sqz_profile_layers/table.h"

#include <algorithm>
#include <cmath>

namespace sqz {
namespace {

constexpr double kWidestBar = 40;

}  // namespace

Rows layers_rows(const LayersFile& layers) {
  const ModelDescription& model = layers.model;
  return {
      {"model", concat(model.architecture, ", ", model.layers, " layers")},
      {"fingerprint", fingerprint(model)},
      {"profiled",
       concat(layers.tokens, " tokens, ", layers.windows, " windows of up to ", layers.window, ", ",
              layers.texts, layers.texts == 1 ? " text" : " texts")},
      {"budget", concat(layers.uniform_budget, " of ", layers.context, " tokens a layer on average",
                        layers.allocation == kAllocationGroups
                            ? concat(", group 2 keeps ", layers.p, " of it")
                            : ", dealt by measured losses")},
      {"producer", layers.producer}};
}

std::string layers_table(const LayersFile& layers) {
  const double least = *std::min_element(layers.cosine.begin(), layers.cosine.end());
  std::string out = "layer   cosine            group    budget  1 - cosine\n";
  for (size_t l = 0; l < layers.cosine.size(); ++l) {
    const double share = least < 1 ? (1 - layers.cosine[l]) / (1 - least) : 0;
    out +=
        printed("%5zu  %7.4f +- %.4f   %3lld  %9lld  ", l, layers.cosine[l], layers.cosine_error[l],
                static_cast<long long>(layers.group[l]), static_cast<long long>(layers.budget[l]));
    out += std::string(static_cast<size_t>(std::lround(kWidestBar * share)), '#') + "\n";
  }
  return out;
}

}  // namespace sqz
