// The text of an answer while its tokens come.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "formats/tokenizer.h"

namespace sqz {

class Answer {
 public:
  explicit Answer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // Adds a token. Returns the text that can be shown now: an unfinished character decodes as U+FFFD
  // for the time being, and is kept back.
  std::string add(int32_t id) {
    constexpr std::string_view kReplacement = "\xef\xbf\xbd";
    ids_.push_back(id);
    // Decodes all tokens again, because a token may complete a character of the one before.
    auto decoded = tokenizer_.decode(ids_);
    if (!decoded.ok()) {
      if (status_.ok()) status_ = decoded.status();
      return {};
    }
    text_ = std::move(decoded).value();
    std::string_view safe = text_;
    while (safe.ends_with(kReplacement)) safe.remove_suffix(kReplacement.size());
    return take(safe.size());
  }
  // The rest of the text.
  std::string finish() { return take(text_.size()); }

  const std::string& text() const { return text_; }
  const Status& status() const { return status_; }  // of decoding

 private:
  std::string take(size_t end) {
    size_t begin = std::exchange(shown_, std::max(shown_, end));
    // The text that was shown may decode as U+FFFD by now, and end within one.
    while (begin < shown_ && (text_[begin] & 0xc0) == 0x80) ++begin;
    return text_.substr(begin, shown_ - begin);
  }

  const Tokenizer& tokenizer_;
  std::vector<int32_t> ids_;
  std::string text_;
  size_t shown_ = 0;
  Status status_;
};

// Replaces "\n", "\t", "\r" and "\\" by the characters that they name. Other backslashes stay.
inline std::string unescape(const std::string& text) {
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
