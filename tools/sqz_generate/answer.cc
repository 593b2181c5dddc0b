#include "tools/sqz_generate/answer.h"

#include <algorithm>

namespace sqz {
namespace {

constexpr std::string_view kReplacement = "\xef\xbf\xbd";  // U+FFFD

}  // namespace

Answer::Answer(const Tokenizer& tokenizer, std::vector<std::string> stops,
               std::function<void(const std::string&)> show)
    : tokenizer_(tokenizer), stops_(std::move(stops)), show_(std::move(show)) {}

bool Answer::add(int32_t id) {
  ids_.push_back(id);
  // Decodes all tokens again, because a token may complete a character of the one before.
  auto decoded = tokenizer_.decode(ids_);
  if (!decoded.ok()) {
    status_ = decoded.status();
    return false;
  }
  text_ = std::move(decoded).value();
  size_t end = std::string::npos;
  for (const std::string& stop : stops_) end = std::min(end, text_.find(stop));
  if (end != std::string::npos) {
    text_.resize(end);
    return false;
  }
  const size_t safe = safe_length();
  if (show_ && safe > shown_) {
    show_(text_.substr(shown_, safe - shown_));
    shown_ = safe;
  }
  return true;
}

void Answer::finish() {
  if (show_ && text_.size() > shown_) show_(text_.substr(shown_));
  shown_ = text_.size();
}

// The length of the text that can be shown. The rest is an unfinished character, which decodes as
// U+FFFD for now, or it may be the beginning of a stop string.
size_t Answer::safe_length() const {
  std::string_view safe = text_;
  while (safe.ends_with(kReplacement)) safe.remove_suffix(kReplacement.size());
  size_t length = safe.size();
  for (const std::string& stop : stops_) {
    for (size_t part = std::min(stop.size() - 1, safe.size()); part > 0; --part) {
      if (!safe.ends_with(std::string_view(stop).substr(0, part))) continue;
      length = std::min(length, safe.size() - part);
      break;
    }
  }
  return length;
}

std::string unescape(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    const char next = text[i] == '\\' && i + 1 < text.size() ? text[i + 1] : '\0';
    const size_t known = next == '\0' ? std::string::npos : std::string_view("ntr\\").find(next);
    if (known == std::string::npos) {
      out += text[i];
    } else {
      out += "\n\t\r\\"[known];
      ++i;
    }
  }
  return out;
}

}  // namespace sqz
