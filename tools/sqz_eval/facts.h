// The facts that are planted in a text, and the questions that ask for them.
//
//   needle   "\nOne of the special magic numbers for harbour is: 1234567.\n"
//     asked  "\nWhat is the special magic number for harbour mentioned in the provided text? The
//             special magic number for harbour mentioned in the provided text is"    " 1234567"
//   passkey  "\nThe pass key is 48213. Remember it. 48213 is the pass key.\n"
//     asked  "\nWhat is the pass key? The pass key is"                               " 48213"
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/random.h"

namespace sqz::eval {

enum class FactKind { kNeedle, kPasskey };

struct Fact {
  FactKind kind = FactKind::kNeedle;
  std::string text;    // what is planted, with a newline at both ends
  std::string prompt;  // what is asked
  std::string answer;  // digits: 4, 5 or 7 of a needle, 5 of a passkey; never a leading zero
};

// Most needles of one text: there are that many words for them.
int64_t most_facts();
// Most of the other needles that random_facts() is asked for.
int64_t most_more_facts();

// `count` needles for different words, then `count` passkeys if asked for, then `more` needles for
// words that are not among the first. No answer is part of another answer or of `text`.
std::vector<Fact> random_facts(Random& random, int64_t count, bool passkeys, int64_t more,
                               std::string_view text);

// The generated text is the answer, whole: a space, the digits, and no digit after them.
bool answers(const Fact& fact, std::string_view generated);
// The generated text can no longer become the answer, or is it already: generating may stop.
bool decided(const Fact& fact, std::string_view generated);

}  // namespace sqz::eval
