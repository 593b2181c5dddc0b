#include "tools/report/svg_plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "formats/base/status.h"
#include "tools/report/html_page.h"

namespace sqz {
namespace {

constexpr double kRight = 16, kBelow = 48, kLegendLine = 18, kCell = 16;
constexpr size_t kColours = 8;  // of the page's style

std::string plotted(const char* pattern, double value) {
  return printed(pattern, value == 0 ? 0 : value);  // no "-0"
}

std::string px(double value) {
  return plotted("%.2f", value);
}
std::string number(double value) {
  return plotted("%.6g", value);
}

std::string colour(size_t series) {
  return concat("var(--s", series % kColours, ")");
}

// A second round of the colours is told from the first by its dashes.
const char* dashes(size_t series) {
  constexpr std::array kDashes = {"", " stroke-dasharray=\"6 3\"", " stroke-dasharray=\"2 2\""};
  return kDashes[std::min(series / kColours, kDashes.size() - 1)];
}

std::string line(const char* style, double x1, double y1, double x2, double y2) {
  return concat("<line ", style, " x1=\"", px(x1), "\" y1=\"", px(y1), "\" x2=\"", px(x2),
                "\" y2=\"", px(y2), "\"/>\n");
}

std::string label(double x, double y, const char* anchor, const std::string& text) {
  return concat("<text x=\"", px(x), "\" y=\"", px(y), "\" text-anchor=\"", anchor, "\">",
                xml_escaped(text), "</text>\n");
}

std::string opened(double width, double height, const std::string& title) {
  return concat("<svg xmlns=\"http://www.w3.org/2000/svg\" role=\"img\" width=\"", px(width),
                "\" height=\"", px(height), "\" viewBox=\"0 0 ", px(width), " ", px(height),
                "\" aria-label=\"", xml_escaped(title), "\">\n");
}

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

double plot_height(const Plot& plot) {
  const double lines = static_cast<double>(plot.series.size() + plot.levels.size());
  return kPlotTop + kPlotHeight + kBelow + kLegendLine * lines;
}

class Drawing {
 public:
  explicit Drawing(const Plot& plot) : plot_(plot) {
    Range x, y;
    for (const PlotSeries& series : plot.series) {
      bars_ += series.mark == Mark::kBars;
      for (const PlotPoint& point : series.points) {
        x.add(point.x);
        y.add(point.y - point.error);
        y.add(point.y + point.error);
      }
    }
    empty_ = x.empty();
    if (empty_) x = y = {0, 1};
    for (const PlotLevel& level : plot.levels) y.add(level.y);
    if (plot.from_zero || bars_ > 0) y.add(0);
    x_ = plot_axis(x.low, x.high, plot.whole_x);
    y_ = plot_axis(y.low, y.high);
  }

  std::string svg() {
    const double bottom = kPlotTop + kPlotHeight;
    out_ = opened(kPlotLeft + kPlotWidth + kRight, plot_height(plot_), plot_.title);
    axes();
    if (empty_) {
      out_ += label(kPlotLeft + kPlotWidth / 2, kPlotTop + kPlotHeight / 2, "middle",
                    "nothing to show");
    }
    size_t bar = 0;
    double below = bottom + kBelow;
    for (size_t i = 0; i < plot_.series.size(); ++i, below += kLegendLine) {
      const PlotSeries& series = plot_.series[i];
      out_ += concat("<g stroke=\"", colour(i), "\" fill=\"", colour(i), "\">\n");
      if (series.mark == Mark::kBars) {
        bars(series, bar++);
      } else {
        points(series, dashes(i));
      }
      out_ += concat("<rect x=\"", px(kPlotLeft), "\" y=\"", px(below - 9),
                     "\" width=\"18\" height=\"8\" fill-opacity=\"0.6\"", dashes(i), "/>\n</g>\n");
      out_ += label(kPlotLeft + 26, below, "start", series.name);
    }
    for (const PlotLevel& level : plot_.levels) {
      constexpr const char* kStyle = "class=\"axis\" stroke-dasharray=\"4 4\"";
      out_ += line(kStyle, kPlotLeft, y_px(level.y), kPlotLeft + kPlotWidth, y_px(level.y));
      out_ += line(kStyle, kPlotLeft, below - 5, kPlotLeft + 18, below - 5);
      out_ += label(kPlotLeft + 26, below, "start", level.name + ": " + number(level.y));
      below += kLegendLine;
    }
    return out_ + "</svg>\n";
  }

 private:
  double x_px(double x) const { return kPlotLeft + kPlotWidth * (x - x_.low) / (x_.high - x_.low); }
  double y_px(double y) const {
    return kPlotTop + kPlotHeight * (y_.high - y) / (y_.high - y_.low);
  }

  void axes() {
    const double right = kPlotLeft + kPlotWidth, bottom = kPlotTop + kPlotHeight;
    for (const double tick : y_.ticks) {
      out_ += line("class=\"grid\"", kPlotLeft, y_px(tick), right, y_px(tick));
      out_ += label(kPlotLeft - 8, y_px(tick) + 4, "end", number(tick));
    }
    for (const double tick : x_.ticks) {
      out_ += line("class=\"axis\"", x_px(tick), bottom, x_px(tick), bottom + 5);
      out_ += label(x_px(tick), bottom + 18, "middle", number(tick));
    }
    out_ += line("class=\"axis\"", kPlotLeft, bottom, right, bottom);
    out_ += line("class=\"axis\"", kPlotLeft, kPlotTop, kPlotLeft, bottom);
    out_ += label(kPlotLeft + kPlotWidth / 2, bottom + 34, "middle", plot_.x_label);
    const double middle = kPlotTop + kPlotHeight / 2;
    out_ +=
        concat("<text transform=\"translate(14 ", px(middle),
               ") rotate(-90)\" text-anchor=\"middle\">", xml_escaped(plot_.y_label), "</text>\n");
    if (!plot_.diagonal) return;
    const double low = std::max(x_.low, y_.low), high = std::min(x_.high, y_.high);
    if (low < high) out_ += line("class=\"grid\"", x_px(low), y_px(low), x_px(high), y_px(high));
  }

  std::string hover(const PlotSeries& series, const PlotPoint& point) const {
    const std::string error = point.error > 0 ? " ± " + number(point.error) : "";
    const std::string& name = point.name.empty() ? series.name : point.name;
    return concat("<title>", xml_escaped(name), ": ", number(point.x), ", ", number(point.y), error,
                  "</title>");
  }

  void points(const PlotSeries& series, const char* dash) {
    if (series.mark == Mark::kLine && series.points.size() > 1) {
      out_ += "<polyline fill=\"none\" stroke-width=\"1.5\"";
      out_ += dash;
      out_ += " points=\"";
      for (size_t i = 0; i < series.points.size(); ++i) {
        const PlotPoint& point = series.points[i];
        out_ += concat(i == 0 ? "" : " ", px(x_px(point.x)), ",", px(y_px(point.y)));
      }
      out_ += "\"/>\n";
    }
    for (const PlotPoint& point : series.points) {
      const double x = x_px(point.x);
      if (point.error > 0) {
        out_ += line("", x, y_px(point.y - point.error), x, y_px(point.y + point.error));
      }
      out_ += concat("<circle cx=\"", px(x), "\" cy=\"", px(y_px(point.y)), "\" r=\"3\">",
                     hover(series, point), "</circle>\n");
    }
  }

  // Bars of several series stand side by side.
  void bars(const PlotSeries& series, size_t which) {
    const double unit = x_px(x_.low + 1) - x_px(x_.low);
    const double width = 0.8 * unit / static_cast<double>(bars_);
    for (const PlotPoint& point : series.points) {
      const double left = x_px(point.x) - 0.4 * unit + width * static_cast<double>(which);
      const double top = y_px(std::max(point.y, 0.0)), bottom = y_px(std::min(point.y, 0.0));
      out_ += concat("<rect x=\"", px(left), "\" y=\"", px(top), "\" width=\"", px(width),
                     "\" height=\"", px(bottom - top), "\" fill-opacity=\"0.6\">",
                     hover(series, point), "</rect>\n");
    }
  }

  const Plot& plot_;
  PlotAxis x_, y_;
  size_t bars_ = 0;  // series of them
  bool empty_ = false;
  std::string out_;
};

}  // namespace

void Plot::add(const std::string& line, const PlotPoint& point) {
  auto at = std::find_if(series.begin(), series.end(),
                         [&](const PlotSeries& own) { return own.name == line; });
  if (at == series.end()) at = series.insert(series.end(), {line, Mark::kLine, {}});
  at->points.push_back(point);
}

void Plot::sort() {
  for (PlotSeries& own : series) {
    std::stable_sort(own.points.begin(), own.points.end(),
                     [](const PlotPoint& a, const PlotPoint& b) { return a.x < b.x; });
  }
}

PlotAxis plot_axis(double low, double high, bool whole, int most) {
  if (whole) {
    low -= 0.5;
    high += 0.5;
  } else if (high - low <= 1e-9 * std::max(std::abs(low), std::abs(high))) {  // some room
    const double room = low == 0 ? 1 : std::abs(low) / 10;
    low -= room;
    high += room;
  }
  double power = std::pow(10, std::floor(std::log10((high - low) / most)));
  if (whole) power = std::max(power, 1.0);
  for (;; power *= 10) {
    for (const double times : {1.0, 2.0, 5.0}) {
      const double step = times * power;
      // What is a tick but for rounding is that tick.
      const double first = whole ? std::ceil(low / step) : std::floor(low / step + 1e-6);
      const double last = whole ? std::floor(high / step) : std::ceil(high / step - 1e-6);
      if (last - first + 1 > most) continue;
      PlotAxis out;
      for (double i = first; i <= last; ++i) out.ticks.push_back(i * step);
      out.low = whole ? low : out.ticks.front();
      out.high = whole ? high : out.ticks.back();
      return out;
    }
  }
}

std::string plot_svg(const Plot& plot) {
  return Drawing(plot).svg();
}

std::string figure_svg(std::span<const Plot> plots, std::string_view style) {
  constexpr double kTitle = 32, kWidth = kPlotLeft + kPlotWidth + kRight;
  double height = 0;
  std::string title;
  for (const Plot& plot : plots) {
    height += kTitle + plot_height(plot);
    title += (title.empty() ? "" : "; ") + plot.title;
  }
  std::string out = opened(kWidth, height, title);
  out += concat("<style>", style, "</style>\n<rect width=\"100%\" height=\"100%\" ",
                "fill=\"var(--back)\"/>\n");
  double top = 0;
  for (const Plot& plot : plots) {
    out += label(kPlotLeft, top + 22, "start", plot.title);
    out +=
        concat("<g transform=\"translate(0 ", px(top + kTitle), ")\">\n", plot_svg(plot), "</g>\n");
    top += kTitle + plot_height(plot);
  }
  return out + "</svg>\n";
}

std::string shade_map_svg(const ShadeMap& map) {
  const auto columns = static_cast<double>(map.columns.size());
  const auto rows = static_cast<double>(map.rows.size());
  const double cell = std::clamp(kPlotWidth / std::max(columns, 1.0), 8.0, 56.0);
  const double bottom = kPlotTop + kCell * rows;
  double most = 0;
  for (const auto& row : map.shares) {
    for (const double share : row) most = std::max(most, share);
  }
  std::string out =
      opened(kPlotLeft + std::max(cell * columns, kPlotWidth) + kRight, bottom + kBelow, map.title);
  for (size_t r = 0; r < map.shares.size(); ++r) {
    const double y = kPlotTop + kCell * static_cast<double>(r);
    out += label(kPlotLeft - 8, y + 12, "end", map.rows[r]);
    for (size_t c = 0; c < map.shares[r].size(); ++c) {
      const double share = map.shares[r][c];
      if (share <= 0) continue;
      out += concat("<rect x=\"", px(kPlotLeft + cell * static_cast<double>(c)), "\" y=\"", px(y),
                    "\" width=\"", px(cell - 1), "\" height=\"", px(kCell - 1),
                    "\" fill=\"var(--s0)\" fill-opacity=\"", plotted("%.3f", share / most),
                    "\"><title>", xml_escaped(concat(map.row_label, " ", map.rows[r], ", ")),
                    xml_escaped(map.columns[c]), ": ", number(share), "</title></rect>\n");
    }
  }
  for (size_t c = 0; c < map.columns.size(); ++c) {
    const double x = kPlotLeft + cell * (static_cast<double>(c) + 0.5);
    out += label(x, bottom + 14, "middle", map.columns[c]);
  }
  out += label(kPlotLeft + cell * columns / 2, bottom + 34, "middle", map.column_label);
  out += concat("<text transform=\"translate(14 ", px((kPlotTop + bottom) / 2),
                ") rotate(-90)\" text-anchor=\"middle\">", xml_escaped(map.row_label),
                "</text>\n</svg>\n");
  return out;
}

}  // namespace sqz
