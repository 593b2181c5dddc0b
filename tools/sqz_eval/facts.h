// The facts (needles) that are planted in a text, and the questions that ask for them.
//
//   planted  "\nOne of the special magic numbers for harbour is: 1234567.\n"
//   asked    "\nWhat is the special magic number for harbour mentioned in the provided text? The
//             special magic number for harbour mentioned in the provided text is"    " 1234567"
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/random.h"

namespace sqz::eval {

struct Fact {
  std::string text;    // is planted; a newline at both ends
  std::string prompt;  // is asked
  std::string answer;  // 4, 5 or 7 digits, no leading zero
};

// Most facts of one text that are asked for, and that calibrate. The words differ.
inline constexpr int64_t kMostFacts = 8, kMostCalibrationFacts = 56;

// `count` facts for different words. No answer is part of another answer or of `text`.
std::vector<Fact> random_facts(Random& random, int64_t count, std::string_view text);

// The generated text is the answer, whole: a space, the digits, and no digit after them.
bool answers(const Fact& fact, std::string_view generated);
// The generated text can no longer become the answer, or is it already: generating may stop.
bool decided(const Fact& fact, std::string_view generated);

}  // namespace sqz::eval
