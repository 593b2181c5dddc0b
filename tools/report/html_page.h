// One HTML page that needs nothing but itself: no script, no font, no image from anywhere. It is
// well-formed XML, too, and readable on light and on dark screens. Every text that is passed in is
// escaped here; only figure() takes markup.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tools/common/output.h"

namespace sqz {

// Colours of series and shades as variables, so that a plot need not know on what it is shown: for
// light screens and for dark ones.
extern const char* const kPlotStyle;

// Text as XML may hold it, between tags or in double quotes: markup escaped, bytes that are not
// UTF-8 and control characters that XML does not allow replaced by U+FFFD.
std::string xml_escaped(std::string_view text);

class HtmlPage {
 public:
  explicit HtmlPage(std::string title) : title_(std::move(title)) {}

  void heading(std::string_view text);     // of a file
  void subheading(std::string_view text);  // of a part of it
  void paragraph(std::string_view text);
  void rows(const Rows& rows);  // names and values, as Output::result() prints them
  // The first column is text, the others are numbers, to the right. Lines as long as `columns`.
  void table(const std::vector<std::string>& columns,
             const std::vector<std::vector<std::string>>& lines);
  // `svg`: markup of svg_plot.h. `caption` says what is to be seen.
  void figure(std::string_view svg, std::string_view caption);

  int64_t figures() const { return figures_; }
  // The page, ending with a line break. The same calls give the same bytes.
  std::string text() const;

 private:
  void element(std::string_view tag, std::string_view text);

  std::string title_, body_;
  int64_t figures_ = 0;
};

}  // namespace sqz
