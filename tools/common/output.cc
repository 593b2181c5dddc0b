#include "tools/common/output.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstring>
#include <iostream>

namespace sqz {
namespace {

void write_stdout(const std::string& text) {
  std::fwrite(text.data(), 1, text.size(), stdout);
  std::fflush(stdout);
}

}  // namespace

void Output::line(const std::string& kind, const JsonMembers& fields, bool last) const {
  const std::lock_guard lock(mutex_);
  if (!json_ || ended_ || silent_) return;
  ended_ = last;
  JsonMembers line = fields;
  line["event"] = kind;
  write_stdout(JsonText(line).str() + "\n");
}

void Output::event(const std::string& kind, const JsonMembers& fields) const {
  line(kind, fields, false);
}

void Output::error(const Status& status) const {
  line("error", {{"code", code_name(status.code())}, {"message", status.message()}}, true);
}

void Output::result(const JsonMembers& fields) const {
  if (silent_) return;
  if (json_) return line("result", fields, true);
  const auto rows = rows_of(fields);
  size_t width = 0;
  for (const auto& [name, value] : rows) width = std::max(width, name.size());
  for (const auto& [name, value] : rows) {
    write_stdout(
        concat(printable(name), std::string(width - name.size() + 2, ' '), printable(value), "\n"));
  }
}

void Output::text(const std::string& text) const {
  if (!json_ && !silent_) write_stdout(text);
}

Status finish_stdout() {
  std::cout.flush();
  errno = 0;
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout.good()) return {};
  return {Code::kIo, concat("standard output: write: ",
                            errno != 0 ? std::strerror(errno) : "an earlier write failed")};
}

std::string printable(const std::string& text) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : 0);
    const bool c1 = byte == 0xc2 && next >= 0x80 && next < 0xa0;  // U+0080 to U+009F
    if (c1) ++i;
    const unsigned char shown = c1 ? next : byte;
    if (c1 || byte < 0x20 || byte == 0x7f) {
      out += concat("\\x", kDigits[shown / 16], kDigits[shown % 16]);
    } else {
      out += text[i];
    }
  }
  return out;
}

std::string columns_text(const std::vector<std::vector<std::string>>& lines, size_t left) {
  std::vector<size_t> widths(lines[0].size());
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i) widths[i] = std::max(widths[i], line[i].size());
  }
  std::string out;
  for (const auto& line : lines) {
    std::string text;
    for (size_t i = 0; i < line.size(); ++i) {
      const std::string fill(widths[i] - line[i].size(), ' ');
      text += (i == 0 ? "" : "  ") + (i < left ? line[i] + fill : fill + line[i]);
    }
    out += text.substr(0, text.find_last_not_of(' ') + 1) + "\n";
  }
  return out;
}

std::vector<std::pair<std::string, std::string>> rows_of(const JsonMembers& fields) {
  constexpr size_t kWidest = 200;
  std::vector<std::pair<std::string, std::string>> rows;
  for (const auto& [key, text] : fields) {
    const JsonDocument document = text.parsed();
    const JsonValue& value = document.root();
    if (value.is_null()) continue;
    if (value.is_object()) {
      JsonMembers members;
      for (const JsonValue& member : value.items()) {
        members[concat(key, ".", member.key())] = JsonText(member);
      }
      for (auto& row : rows_of(members)) rows.push_back(std::move(row));
    } else if (value.is_array() && value.size() > 0 && value[0].is_string()) {
      for (size_t i = 0; i < value.size(); ++i) rows.emplace_back(key, value[i].string());
    } else {
      std::string shown = value.is_string() ? std::string(value.string()) : text.str();
      if (shown.size() > kWidest) shown = shown.substr(0, kWidest) + " ...";
      rows.emplace_back(key, std::move(shown));
    }
  }
  return rows;
}

std::string fixed_text(double value, int digits) {
  std::array<char, 400> buffer{};
  std::snprintf(buffer.data(), buffer.size(), "%.*f", digits, value);
  return buffer.data();
}

}  // namespace sqz
