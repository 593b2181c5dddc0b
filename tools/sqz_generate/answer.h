// The text of an answer as its tokens come: what may be shown already, and where it ends.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "formats/tokenizer.h"

namespace sqz {

class Answer {
 public:
  // `show` (may be empty) receives the text in pieces; their concatenation is text(). `stops` are
  // strings that end the answer and are no part of it.
  Answer(const Tokenizer& tokenizer, std::vector<std::string> stops,
         std::function<void(const std::string&)> show);

  // Adds a token; false once a stop string is complete or decoding failed.
  bool add(int32_t id);
  // Shows what was held back.
  void finish();

  const std::string& text() const { return text_; }
  const Status& status() const { return status_; }

 private:
  size_t safe_length() const;

  const Tokenizer& tokenizer_;
  std::vector<std::string> stops_;
  std::function<void(const std::string&)> show_;
  std::vector<int32_t> ids_;
  std::string text_;
  size_t shown_ = 0;
  Status status_;
};

// "\n", "\t", "\r" and "\\" as the characters that they name; any other backslash stays.
std::string unescape(const std::string& text);

}  // namespace sqz
