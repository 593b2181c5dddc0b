#include "tools/sqz_eval/trials.h"

#include <algorithm>
#include <array>

namespace sqz::eval {
namespace {

constexpr std::array kWords = {
    "harbour",  "lantern", "meadow",  "copper", "violin", "glacier", "saddle",  "orchard",
    "compass",  "velvet",  "thunder", "marble", "pepper", "falcon",  "candle",  "bridge",
    "cellar",   "feather", "garden",  "hammer", "island", "jacket",  "kettle",  "ladder",
    "mirror",   "needle",  "ocean",   "pillow", "quarry", "ribbon",  "shadow",  "timber",
    "umbrella", "valley",  "window",  "anchor", "basket", "castle",  "dragon",  "engine",
    "forest",   "guitar",  "helmet",  "insect", "jungle", "kitchen", "lemon",   "monkey",
    "nickel",   "oyster",  "pencil",  "rabbit", "silver", "temple",  "unicorn", "vessel",
    "walnut",   "yellow",  "zebra",   "barrel", "canyon", "desert",  "ember",   "fountain"};
static_assert(kWords.size() == kMostFacts + kMostCalibrationFacts);
constexpr std::array<int, 3> kDigits = {4, 5, 7};  // as in the texts of README's models

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

std::string random_digits(Random& random, int digits) {
  std::string out(1, static_cast<char>('1' + random.below(9)));
  while (out.size() < static_cast<size_t>(digits)) {
    out += static_cast<char>('0' + random.below(10));
  }
  return out;
}

// Draws digits that are nowhere in `text` and share nothing with the answers so far. A text may
// have all numbers of so many digits; then longer ones are drawn.
std::string fresh_digits(Random& random, int digits, std::string_view text,
                         const std::vector<Fact>& facts) {
  for (int tries = 0;; ++tries) {
    const std::string out = random_digits(random, digits + tries / 1000);
    const bool used = std::any_of(facts.begin(), facts.end(), [&](const Fact& fact) {
      return fact.answer.find(out) != std::string::npos ||
             out.find(fact.answer) != std::string::npos;
    });
    if (!used && text.find(out) == std::string_view::npos) return out;
  }
}

Fact needle(const std::string& word, const std::string& digits) {
  const std::string asked = "special magic number for " + word + " mentioned in the provided text";
  return {"\nOne of the special magic numbers for " + word + " is: " + digits + ".\n",
          "\nWhat is the " + asked + "? The " + asked + " is", digits};
}

}  // namespace

std::vector<Fact> random_facts(Random& random, int64_t count, std::string_view text) {
  std::vector<size_t> words(kWords.size());
  for (size_t i = 0; i < words.size(); ++i) words[i] = i;
  for (size_t i = words.size() - 1; i > 0; --i) std::swap(words[i], words[random.below(i + 1)]);
  std::vector<Fact> out;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const int digits = kDigits[random.below(kDigits.size())];
    out.push_back(needle(kWords[words[i]], fresh_digits(random, digits, text, out)));
  }
  return out;
}

bool answers(const Fact& fact, std::string_view generated) {
  const std::string expected = " " + fact.answer;
  if (!generated.starts_with(expected)) return false;
  return generated.size() == expected.size() || !is_digit(generated[expected.size()]);
}

bool decided(const Fact& fact, std::string_view generated) {
  const std::string expected = " " + fact.answer;
  return generated.size() > expected.size() || !expected.starts_with(generated);
}

}  // namespace sqz::eval
