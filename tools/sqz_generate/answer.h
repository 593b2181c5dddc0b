// Turns the tokens of an answer into text: decides how much can be shown, and where the answer
// ends.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "formats/tokenizer.h"

namespace sqz {

class Answer {
 public:
  // `show` (may be empty) receives the text in pieces, which together are text(). `stops` are
  // strings that end the answer. The answer does not contain them.
  Answer(const Tokenizer& tokenizer, std::vector<std::string> stops,
         std::function<void(const std::string&)> show);

  // Adds a token. Returns false once a stop string is complete or if decoding failed.
  bool add(int32_t id);
  // Shows the rest of the text.
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

// Replaces "\n", "\t", "\r" and "\\" by the characters that they name. Other backslashes stay.
std::string unescape(const std::string& text);

}  // namespace sqz
