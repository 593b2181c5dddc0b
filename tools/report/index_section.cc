#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <numeric>

#include "libruntime/index_tables.h"
#include "tools/common/index_table.h"
#include "tools/report/sections.h"
#include "tools/report/svg_plot.h"

namespace sqz {
namespace {

constexpr std::array kAsked = {0.01, 0.02, 0.05, 0.1, 0.2, 0.5};  // fractions of the keys
constexpr double kShown = 0.1;                                    // of them, by layer and head
constexpr float kLowest = -1e29F;  // thresholds at most so are below every score
constexpr std::array kScopes = {"generation", "prompt"};
constexpr std::array kPaths = {"finest level alone", "whole tree"};

size_t grid(double keep) {
  return static_cast<size_t>(std::lround(keep * static_cast<double>(Calibration::kGrid - 1)));
}

// Sizes go into bins of 0, 1, 2, 3 to 4, 5 to 8, ...
size_t bin_of(uint32_t size) {
  return size == 0 ? 0 : static_cast<size_t>(std::bit_width(size - 1)) + 1;
}
std::string bin_name(size_t bin) {
  if (bin < 3) return concat(bin);
  return concat("≤ ", uint64_t{1} << (bin - 1));
}

// One partition of a layer's keys: [Hkv, n] sizes.
struct Part {
  std::string level;
  const std::vector<uint32_t>* sizes;
};

// Coarse to fine; none of a layer that is dense or of pages.
std::vector<Part> parts_of(const LayerView& layer, const LayerTable& table) {
  std::vector<Part> out;
  for (int k = 0; k < layer.levels; ++k) {
    out.push_back({concat(k + 1), &table.level[static_cast<size_t>(k)].sizes});
  }
  if (layer.buckets > 0) out.push_back({"buckets", &table.bucket_sizes});
  return out;
}

std::vector<std::string> sizes_line(int64_t layer, const std::string& level,
                                    std::vector<uint32_t> sizes) {
  std::sort(sizes.begin(), sizes.end());
  const double keys = std::accumulate(sizes.begin(), sizes.end(), 0.0);
  const size_t tenth = (sizes.size() + 9) / 10;
  const double in_largest =
      std::accumulate(sizes.end() - static_cast<std::ptrdiff_t>(tenth), sizes.end(), 0.0);
  return {concat(layer),
          level,
          concat(sizes.size()),
          concat(sizes.front()),
          concat(sizes[sizes.size() / 2]),
          fixed_text(keys / static_cast<double>(sizes.size()), 1),
          concat(sizes.back()),
          fixed_text(keys > 0 ? 100 * in_largest / keys : 0, 1)};
}

Status add_cluster_sizes(const SqzFile& file, HtmlPage& page) {
  ShadeMap map;
  map.title = "Share of the clusters of each size, by layer";
  map.column_label = "keys of a bucket, or of a cluster of the finest level";
  map.row_label = "layer";
  std::vector<std::vector<std::string>> lines;
  std::vector<bool> used(34);  // bins
  for (int64_t l = 0; l < file.metadata().model.layers; ++l) {
    LayerView layer = file.layer(l);
    SQZ_ASSIGN_OR_RETURN(const LayerTable table, make_layer_table(layer, l, file.path()));
    const std::vector<Part> parts = parts_of(layer, table);
    if (parts.empty()) continue;
    for (const Part& part : parts) lines.push_back(sizes_line(l, part.level, *part.sizes));
    const std::vector<uint32_t>& finest = *parts.back().sizes;
    std::vector<double> shares(used.size());
    for (const uint32_t size : finest) shares[bin_of(size)] += 1;
    for (size_t b = 0; b < shares.size(); ++b) {
      used[b] = used[b] || shares[b] > 0;
      shares[b] /= static_cast<double>(finest.size());
    }
    map.rows.push_back(concat(l));
    map.shares.push_back(std::move(shares));
  }
  if (lines.empty()) return {};
  const auto first = std::find(used.begin(), used.end(), true) - used.begin();
  const auto end = used.rend() - std::find(used.rbegin(), used.rend(), true);
  for (auto& shares : map.shares) shares = {shares.begin() + first, shares.begin() + end};
  for (auto b = first; b < end; ++b) map.columns.push_back(bin_name(static_cast<size_t>(b)));
  page.subheading("Sizes of clusters");
  page.figure(shade_map_svg(map),
              "Share of a layer's clusters of each size, all KV heads together.");
  page.table({"layer", "level", "clusters", "least keys", "median", "mean", "most",
              "% of keys in the largest tenth"},
             lines);
  return {};
}

// Threshold curves: which threshold keeps so many of the keys.
void add_thresholds(const Calibration& calibration, bool tree, HtmlPage& page) {
  Plot plot;
  plot.title = "Thresholds by the fraction of keys that they keep";
  plot.x_label = "fraction of the clustered keys that is kept";
  plot.y_label = "ln T, logarithm of the least score";
  const auto points = static_cast<size_t>(Calibration::kGrid);
  for (size_t scope = 0; scope < kScopes.size(); ++scope) {
    for (size_t path = 0; path < (tree ? kPaths.size() : 1); ++path) {
      PlotSeries series{concat(kScopes[scope], ", ", kPaths[path]), Mark::kLine, {}};
      const float* curve = calibration.thresholds.data() +
                           (scope * Calibration::kPaths + path) * Calibration::kGroups * points;
      for (size_t i = 16; i + 1 < points; i += 16) {
        if (curve[i] > kLowest) {
          series.points.push_back(
              {static_cast<double>(i) / static_cast<double>(points - 1), double{curve[i]}, 0});
        }
      }
      plot.series.push_back(std::move(series));
    }
  }
  page.subheading("Calibration");
  page.figure(plot_svg(plot),
              "A cluster is read where its score is T or more: the share of the attention that "
              "each of its keys is expected to get, as a mean over a group of query heads. ln T is "
              "the natural logarithm of T: -7 is a share of about 0.001. The lower T, the more is "
              "read.");
}

// What each (layer, KV head) keeps where a fraction is asked of all together.
void add_shares(const Calibration& calibration, const IndexMetadata& metadata, HtmlPage& page) {
  const auto heads = static_cast<size_t>(metadata.model.kv_heads);
  const auto points = static_cast<size_t>(Calibration::kGrid);
  std::vector<std::vector<std::string>> lines;
  Plot plot;
  plot.title = "Share of the keys that each KV head keeps";
  plot.x_label = "layer";
  plot.y_label = "share of its keys that a KV head keeps";
  plot.whole_x = plot.from_zero = true;
  plot.levels = {{"asked of all together", kShown}};
  for (size_t scope = 0; scope < kScopes.size(); ++scope) {
    plot.series.push_back({kScopes[scope], Mark::kDots, {}});
    for (const double asked : kAsked) {
      std::vector<double> kept;
      for (size_t l = 0; l < metadata.layers.size(); ++l) {
        if (metadata.layers[l].dense) continue;
        for (size_t h = 0; h < heads; ++h) {
          const size_t head = (scope * metadata.layers.size() + l) * heads + h;
          kept.push_back(double{calibration.shares[head * points + grid(asked)]});
          if (asked == kShown) {
            plot.series.back().points.push_back({static_cast<double>(l), kept.back(), 0});
          }
        }
      }
      const double sum = std::accumulate(kept.begin(), kept.end(), 0.0);
      const float* curve = calibration.thresholds.data() +
                           scope * Calibration::kPaths * Calibration::kGroups * points;
      lines.push_back({kScopes[scope], fixed_text(asked, 2),
                       fixed_text(sum / static_cast<double>(kept.size()), 4),
                       fixed_text(*std::min_element(kept.begin(), kept.end()), 4),
                       fixed_text(*std::max_element(kept.begin(), kept.end()), 4),
                       fixed_text(double{curve[grid(asked)]}, 3)});
    }
  }
  page.figure(plot_svg(plot), concat("What each KV head keeps of the calibration's queries where ",
                                     kShown, " of all keys is asked for."));
  page.table({"scope", "asked", "delivered: mean", "least head", "most", "ln T, finest level"},
             lines);
  page.paragraph(
      "Asked and delivered are fractions of the clustered keys, of the queries that calibrated the "
      "index. What other questions and texts get is measured by sqz-eval.");
}

void add_what_is_left(const IndexMetadata& metadata, HtmlPage& page) {
  Plot plot;
  plot.title = "Keys that are left, by layer";
  plot.x_label = "layer";
  plot.y_label = "keys a KV head";
  plot.whole_x = true;
  plot.series = {{"clustered keys that are left", Mark::kBars, {}}};
  for (size_t l = 0; l < metadata.layers.size(); ++l) {
    plot.series[0].points.push_back(
        {static_cast<double>(l), static_cast<double>(metadata.layers[l].kept), 0});
  }
  page.subheading("What is left");
  page.figure(plot_svg(plot), concat("Of ", metadata.tokens - metadata.sink - metadata.tail,
                                     "; sink and tail are there in any case."));
}

}  // namespace

Status add_index_section(const std::string& path, HtmlPage& page) {
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(path));
  SQZ_ASSIGN_OR_RETURN(const Calibration calibration, file->calibration());
  const IndexMetadata& metadata = file->metadata();
  page.heading("Index " + path);
  page.rows(index_rows(*file, calibration));
  SQZ_RETURN_IF_ERROR(add_cluster_sizes(*file, page));
  if (!calibration.thresholds.empty() && calibration.queries > 0) {
    add_thresholds(calibration, metadata.levels > 1, page);
    add_shares(calibration, metadata, page);
  }
  if (metadata.pruned) add_what_is_left(metadata, page);
  if (metadata.layer_budgets) {
    page.subheading("Layer budgets");
    add_budgets(metadata.layer_budgets->budget, metadata.layer_budgets->uniform_budget, page);
  }
  return {};
}

}  // namespace sqz
