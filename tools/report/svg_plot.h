// Plots as SVG markup, to stand in an HtmlPage, whose style has their colours: points, lines and
// bars over two linear axes, and maps of shaded cells. Numbers are shown on hovering. The markup is
// well-formed XML and draws itself alone.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace sqz {

// The part of an SVG where points are drawn, in its pixels: x of an axis' low end is `left`, of its
// high end left + width; y of the low end is top + height, of the high end `top`.
inline constexpr double kPlotLeft = 72, kPlotTop = 12, kPlotWidth = 620, kPlotHeight = 260;

inline constexpr double kMostPlotted = 1e30;

enum class Mark { kDots, kLine, kBars };  // kLine: dots with a line through them

struct PlotPoint {
  double x = 0, y = 0;
  double error = 0;       // standard error of y: a line from y - error to y + error; 0: none
  std::string name = {};  // shown under the pointer in front of x and y; empty: the series' name
};

struct PlotSeries {
  std::string name;
  Mark mark = Mark::kLine;
  std::vector<PlotPoint> points;  // of a line: from left to right. All numbers
                                  // are at most kMostPlotted in size
};

// A dashed line across the plot.
struct PlotLevel {
  std::string name;
  double y = 0;
};

struct Plot {
  std::string title;  // for those who cannot see it
  std::string x_label, y_label;
  std::vector<PlotSeries> series;
  std::vector<PlotLevel> levels;
  bool whole_x = false;    // x are whole numbers, as those of layers
  bool from_zero = false;  // the y axis has 0 on it; it does where there are bars
  bool diagonal = false;   // a faint line at y = x

  // To the line of this name, made if there is none.
  void add(const std::string& line, const PlotPoint& point);
  void sort();  // the points of each series, from left to right
};

// Ticks are multiples of 1, 2 or 5 times a power of ten, at most `most` of them (at least 2). They
// enclose [low, high] and end the axis; of whole numbers they lie within, and the axis has half a
// number more on either side.
struct PlotAxis {
  double low = 0, high = 1;
  std::vector<double> ticks;
};
PlotAxis plot_axis(double low, double high, bool whole = false, int most = 8);

// A plot without a point says so in its middle.
std::string plot_svg(const Plot& plot);

// Plots one below the other, each under its title, as a file of its own. `style`: kPlotStyle.
std::string figure_svg(std::span<const Plot> plots, std::string_view style);

// Cells with a share of something: the greatest is the darkest, 0 is empty.
struct ShadeMap {
  std::string title;
  std::string column_label, row_label;
  std::vector<std::string> columns, rows;
  std::vector<std::vector<double>> shares;  // [rows][columns], finite, >= 0
};
std::string shade_map_svg(const ShadeMap& map);

}  // namespace sqz
