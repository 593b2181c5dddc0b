// Plots and pages: where things are drawn, and that nothing breaks out of the markup.
#include <gmock/gmock.h>

#include "tests/tools/xml.h"
#include "tools/report/html_page.h"
#include "tools/report/svg_plot.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::read_xml;
using testing::XmlElement;

TEST(PlotAxis, TicksAreRoundNumbersAroundTheData) {
  EXPECT_THAT(plot_axis(0, 1).ticks, ElementsAre(0, 0.2, 0.4, ::testing::DoubleEq(0.6), 0.8, 1));
  EXPECT_THAT(plot_axis(0.31, 3.99).ticks, ElementsAre(0, 1, 2, 3, 4));
  EXPECT_THAT(plot_axis(-7, 12).ticks, ElementsAre(-10, -5, 0, 5, 10, 15));
  EXPECT_THAT(plot_axis(0, 3, true).ticks, ElementsAre(0, 1, 2, 3)) << "no half a layer";
  EXPECT_EQ(plot_axis(0, 3, true).low, -0.5);
  EXPECT_EQ(plot_axis(0, 3, true).high, 3.5);
  EXPECT_THAT(plot_axis(3, 3, true).ticks, ElementsAre(3));
  EXPECT_THAT(plot_axis(0, 31, true).ticks, ElementsAre(0, 5, 10, 15, 20, 25, 30));
  EXPECT_THAT(plot_axis(100, 100).ticks, ElementsAre(90, 95, 100, 105, 110));
  EXPECT_EQ(plot_axis(0, 0).low, -1);
  for (const double size : {1e-12, 1e-3, 1.0, 7e5, kMostPlotted}) {
    for (const double low : {-1.0, 0.0, 0.999, 0.9999999}) {
      const PlotAxis axis = plot_axis(low * size, size);
      EXPECT_GE(axis.ticks.size(), 2u);
      EXPECT_LE(axis.ticks.size(), 8u);
      EXPECT_LE(axis.low, low * size + 1e-5 * size);
      EXPECT_GE(axis.high, size - 1e-5 * size);
    }
  }
}

// Where the frame says that a value is.
double x_of(double part) {
  return kPlotLeft + kPlotWidth * part;
}
double y_of(double part) {
  return kPlotTop + kPlotHeight * (1 - part);
}

TEST(PlotSvg, PointsLieWhereTheAxesSay) {
  Plot plot;
  plot.title = "t";
  plot.x_label = "keys";
  plot.y_label = "loss";
  plot.series = {{"a", Mark::kLine, {{0, 10, 0}, {50, 20, 5}, {100, 30, 0}}},
                 {"b", Mark::kDots, {{25, 15, 0}}}};
  plot.levels = {{"dense", 10}};
  const XmlElement svg = read_xml(plot_svg(plot));
  EXPECT_EQ(svg.name, "svg");
  EXPECT_EQ(svg.attributes.at("aria-label"), "t");
  const auto circles = svg.all("circle");
  ASSERT_EQ(circles.size(), 4u);
  const double expected[4][2] = {{0, 0}, {0.5, 0.5}, {1, 1}, {0.25, 0.25}};  // axes: 0-100, 10-30
  for (size_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(circles[i]->number("cx"), x_of(expected[i][0]), 0.01) << i;
    EXPECT_NEAR(circles[i]->number("cy"), y_of(expected[i][1]), 0.01) << i;
  }
  EXPECT_EQ(circles[1]->children.at(0).text, "a: 50, 20 ± 5");
  const auto lines = svg.all("polyline");
  ASSERT_EQ(lines.size(), 1u) << "dots have none";
  EXPECT_EQ(lines[0]->attributes.at("points"), "72.00,272.00 382.00,142.00 692.00,12.00");
  // The error's line, upright, a quarter of the axis to either side.
  int upright = 0, across = 0;
  for (const XmlElement* line : svg.all("line")) {
    if (line->attributes.contains("class")) {
      across += line->attributes.contains("stroke-dasharray") &&
                line->number("x2") == kPlotLeft + kPlotWidth;
      continue;
    }
    ++upright;
    EXPECT_NEAR(line->number("x1"), x_of(0.5), 0.01);
    EXPECT_NEAR(line->number("y1"), y_of(0.25), 0.01);
    EXPECT_NEAR(line->number("y2"), y_of(0.75), 0.01);
  }
  EXPECT_EQ(upright, 1);
  EXPECT_EQ(across, 1) << "the level";
  std::string texts;
  for (const XmlElement* text : svg.all("text")) texts += text->text + "|";
  EXPECT_THAT(texts, HasSubstr("|a|b|dense: 10|"));
  EXPECT_THAT(texts, HasSubstr("|keys|loss|"));
}

TEST(PlotSvg, BarsStandSideBySideOnZero) {
  Plot plot;
  plot.whole_x = true;
  plot.series = {{"a", Mark::kBars, {{0, 4, 0}, {1, 2, 0}}}, {"b", Mark::kBars, {{0, 1, 0}}}};
  const XmlElement svg = read_xml(plot_svg(plot));
  std::vector<const XmlElement*> bars;
  for (const XmlElement* rect : svg.all("rect")) {
    if (!rect->children.empty()) bars.push_back(rect);  // the legend's have no number to hover
  }
  ASSERT_EQ(bars.size(), 3u);
  const double bottom = kPlotTop + kPlotHeight;
  for (const XmlElement* bar : bars) {
    EXPECT_NEAR(bar->number("y") + bar->number("height"), bottom, 0.02);
  }
  EXPECT_NEAR(bars[0]->number("height"), 2 * bars[1]->number("height"), 0.02);
  EXPECT_NEAR(bars[0]->number("height"), 4 * bars[2]->number("height"), 0.04);
  EXPECT_NEAR(bars[0]->number("x") + bars[0]->number("width"), bars[2]->number("x"), 0.02);
  EXPECT_GT(bars[0]->number("x"), kPlotLeft);
  EXPECT_LT(bars[1]->number("x"), kPlotLeft + kPlotWidth);
}

TEST(PlotSvg, NothingIsSaidSo) {
  const XmlElement svg = read_xml(plot_svg({}));
  bool said = false;
  for (const XmlElement* text : svg.all("text")) said |= text->text == "nothing to show";
  EXPECT_TRUE(said);
}

TEST(ShadeMap, CellsAreAsDarkAsTheirShares) {
  ShadeMap map;
  map.row_label = "layer";
  map.columns = {"1", "2"};
  map.rows = {"0", "7"};
  map.shares = {{0.5, 0}, {0.25, 0.125}};
  const XmlElement svg = read_xml(shade_map_svg(map));
  const auto cells = svg.all("rect");
  ASSERT_EQ(cells.size(), 3u) << "0 is no cell";
  EXPECT_EQ(cells[0]->number("fill-opacity"), 1);
  EXPECT_EQ(cells[1]->number("fill-opacity"), 0.5);
  EXPECT_EQ(cells[2]->number("fill-opacity"), 0.25);
  EXPECT_EQ(cells[0]->number("x"), cells[1]->number("x"));
  EXPECT_LT(cells[1]->number("x"), cells[2]->number("x"));
  EXPECT_LT(cells[0]->number("y"), cells[1]->number("y"));
  EXPECT_EQ(cells[2]->children.at(0).text, "layer 7, 2: 0.125");
}

constexpr const char* kHostile =
    "</title><script>alert('x')</script>\" onload=\"y\" & ]]> \x01\xff é";
constexpr const char* kHarmless =
    "</title><script>alert('x')</script>\" onload=\"y\" & ]]> \ufffd\ufffd é";

TEST(Page, HostileTextStaysText) {
  Plot plot;
  plot.title = plot.x_label = plot.y_label = kHostile;
  plot.series = {{kHostile, Mark::kLine, {{1, 1, 0}}}};
  plot.levels = {{kHostile, 2}};
  ShadeMap map;
  map.title = map.column_label = map.row_label = kHostile;
  map.columns = map.rows = {kHostile};
  map.shares = {{1}};
  HtmlPage page(kHostile);
  page.heading(kHostile);
  page.subheading(kHostile);
  page.paragraph(kHostile);
  page.rows({{kHostile, kHostile}});
  page.table({kHostile}, {{kHostile}});
  page.figure(plot_svg(plot) + shade_map_svg(map), kHostile);
  EXPECT_EQ(page.figures(), 1);
  const std::string text = page.text();
  const XmlElement html = read_xml(text);
  EXPECT_EQ(html.all("script").size(), 0u);
  for (const char* tag : {"title", "h1", "h2", "h3", "p", "td", "figcaption"}) {
    ASSERT_FALSE(html.all(tag).empty()) << tag;
    EXPECT_EQ(html.all(tag)[0]->text, kHarmless) << tag;
  }
  for (const XmlElement* svg : html.all("svg")) {
    EXPECT_EQ(svg->attributes.at("aria-label"), kHarmless);
    EXPECT_FALSE(svg->attributes.contains("onload"));
  }
}

TEST(Page, StandsAlone) {
  HtmlPage page("t");
  page.table({"a", "b"}, {{"1", "2"}, {"3", "4"}});
  const std::string text = page.text();
  EXPECT_EQ(text, page.text());
  const XmlElement html = read_xml(text);
  ASSERT_EQ(html.all("tr").size(), 3u);
  EXPECT_EQ(html.all("tr")[2]->children.at(1).text, "4");
  for (const char* loads : {"src=", "href=", "url(", "@import", "<script", "<link"}) {
    EXPECT_EQ(text.find(loads), std::string::npos) << loads;
  }
  // Light and dark screens have a colour each for everything that is drawn.
  const std::string style = html.all("style").at(0)->text;
  const size_t dark = style.find("prefers-color-scheme: dark");
  ASSERT_NE(dark, std::string::npos);
  for (const char* colour : {"--back:", "--ink:", "--faint:", "--line:", "--s0:", "--s7:"}) {
    EXPECT_LT(style.find(colour), dark) << colour;
    EXPECT_NE(style.find(colour, dark), std::string::npos) << colour;
  }
}

}  // namespace
}  // namespace sqz
