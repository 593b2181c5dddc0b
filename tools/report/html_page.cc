#include "tools/report/html_page.h"

#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr const char* kPageStyle = R"(
:root { color-scheme: light dark; }
body { background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 3rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin-top: 2rem; }
table { border-collapse: collapse; font-size: 0.85rem; display: block; overflow-x: auto; }
th, td { text-align: right; padding: 0.15rem 0.7rem; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; vertical-align: top; }
th:first-child, td:first-child, table.rows td { text-align: left; overflow-wrap: anywhere; }
th { font-weight: 600; } table.rows th { font-weight: normal; color: var(--faint); }
figure { margin: 1.5rem 0; } figcaption { color: var(--faint); font-size: 0.85rem; }
svg { max-width: 100%; height: auto; }
)";

// Whether XML 1.0 has the character at all, escaped or not.
bool allowed(uint32_t c) {
  if (c < 0x20) return c == '\t' || c == '\n' || c == '\r';
  return c != 0xfffe && c != 0xffff;
}

}  // namespace

// The eight are Okabe and Ito's, which most colour-blind people can tell apart.
const char* const kPlotStyle = R"(
:root { --back: #ffffff; --ink: #1b1b1b; --faint: #6b6b6b;
  --line: #d9d9d9; --s0: #0072b2; --s1: #d55e00; --s2: #009e73; --s3: #b5679a; --s4: #a67c00;
  --s5: #2f8fc4; --s6: #8a8a00; --s7: #555555; }
@media (prefers-color-scheme: dark) {
  :root { --back: #16181b; --ink: #e6e6e6; --faint: #a0a0a0; --line: #3a3d42; --s0: #5ab4f0;
    --s1: #ff8c42; --s2: #2ecc9a; --s3: #e09ac8; --s4: #e6b000; --s5: #86cdf5; --s6: #d8d84a;
    --s7: #c4c4c4; } }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
.axis { stroke: var(--faint); fill: none; } .grid { stroke: var(--line); fill: none; }
)";

std::string xml_escaped(std::string_view text) {
  const std::string valid = utf8_lossy(std::string(text));
  std::string out;
  for (size_t at = 0; at < valid.size();) {
    const uint32_t c = next_char(valid, at);
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      default:
        append_utf8(allowed(c) ? c : 0xfffd, out);
    }
  }
  return out;
}

void HtmlPage::element(std::string_view tag, std::string_view text) {
  body_ += concat("<", tag, ">", xml_escaped(text), "</", tag, ">\n");
}

void HtmlPage::heading(std::string_view text) {
  element("h2", text);
}

void HtmlPage::subheading(std::string_view text) {
  element("h3", text);
}

void HtmlPage::paragraph(std::string_view text) {
  element("p", text);
}

void HtmlPage::rows(const Rows& rows) {
  body_ += "<table class=\"rows\">\n";
  for (const auto& [name, value] : rows) {
    body_ += concat("<tr><th>", xml_escaped(name), "</th><td>", xml_escaped(value), "</td></tr>\n");
  }
  body_ += "</table>\n";
}

void HtmlPage::table(const std::vector<std::string>& columns,
                     const std::vector<std::vector<std::string>>& lines) {
  const auto row = [&](const std::vector<std::string>& cells, const char* tag) {
    body_ += "<tr>";
    for (const std::string& cell : cells) {
      body_ += concat("<", tag, ">", xml_escaped(cell), "</", tag, ">");
    }
    body_ += "</tr>\n";
  };
  body_ += "<table>\n";
  row(columns, "th");
  for (const auto& line : lines) row(line, "td");
  body_ += "</table>\n";
}

void HtmlPage::figure(std::string_view svg, std::string_view caption) {
  ++figures_;
  body_ +=
      concat("<figure>\n", svg, "<figcaption>", xml_escaped(caption), "</figcaption>\n</figure>\n");
}

std::string HtmlPage::text() const {
  return concat(
      "<!DOCTYPE html>\n<html lang=\"en\" xmlns=\"http://www.w3.org/1999/xhtml\">\n<head>\n"
      "<meta charset=\"utf-8\"/>\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\"/>\n<title>",
      xml_escaped(title_), "</title>\n<style>", kPlotStyle, kPageStyle,
      "</style>\n</head>\n<body>\n<h1>", xml_escaped(title_), "</h1>\n", body_,
      "</body>\n</html>\n");
}

}  // namespace sqz
