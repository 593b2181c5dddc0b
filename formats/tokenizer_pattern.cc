// Oniguruma (Ruby dialect) to PCRE2, for the constructs that tokenizer.json files use.
#include <cctype>

#include "formats/tokenizer_regex.h"

namespace sqz {
namespace {

// Unicode White_Space. PCRE2's own \s adds U+180E, which left that property in Unicode 6.3.
constexpr char kSpaces[] =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";
constexpr char kNotSpaces[] =
    "\\x{0}-\\x{8}\\x{e}-\\x{1f}\\x{21}-\\x{84}\\x{86}-\\x{9f}\\x{a1}-\\x{167f}\\x{1681}-\\x{1fff}"
    "\\x{200b}-\\x{2027}\\x{202a}-\\x{202e}\\x{2030}-\\x{205e}\\x{2060}-\\x{2fff}"
    "\\x{3001}-\\x{10ffff}";
// Oniguruma's word characters, which for Latin-1 have superscripts and fractions; PCRE2's are L, N
// and underscore.
constexpr char kWord[] = "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{b2}\\x{b3}\\x{b9}\\x{bc}-\\x{be}";
// Letters and numbers of Unicode 15 and 16: `tokenizers` knows them, Debian 12's PCRE2 (Unicode 14)
// does not. Where PCRE2 is newer they are in \p{L} and \p{N} already.
constexpr char kNewLetters[] =
    "\\x{1c89}-\\x{1c8a}\\x{a7cb}-\\x{a7cd}\\x{a7da}-\\x{a7dc}\\x{105c0}-\\x{105f3}"
    "\\x{10d4a}-\\x{10d65}\\x{10d6f}-\\x{10d85}\\x{10ec2}-\\x{10ec4}\\x{1123f}-\\x{11240}"
    "\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}\\x{113b7}\\x{113d1}"
    "\\x{113d3}\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}\\x{11f12}-\\x{11f33}"
    "\\x{1342f}\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}\\x{16100}-\\x{1611d}"
    "\\x{16d40}-\\x{16d6c}\\x{18cff}\\x{1b132}\\x{1b155}\\x{1df25}-\\x{1df2a}"
    "\\x{1e030}-\\x{1e06d}\\x{1e4d0}-\\x{1e4eb}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}"
    "\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}";
constexpr char kNewNumbers[] =
    "\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11f50}-\\x{11f59}"
    "\\x{16130}-\\x{16139}\\x{16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}\\x{1d2c0}-\\x{1d2d3}"
    "\\x{1e4f0}-\\x{1e4f9}\\x{1e5f1}-\\x{1e5fa}";

class Translator {
 public:
  Translator(std::string_view pattern, std::string_view label) : in_(pattern), label_(label) {}

  Result<std::string> run() {
    while (at_ < in_.size()) {
      SQZ_RETURN_IF_ERROR(in_class_ ? class_item() : item());
    }
    return std::move(out_);
  }

 private:
  bool starts(std::string_view text) const { return in_.substr(at_).starts_with(text); }

  Status refuse(std::string_view construct) const {
    return {Code::kUnsupported, concat(label_, ": regular expression construct ", construct,
                                       " at offset ", at_, " of \"", in_, "\" is not supported")};
  }

  Status replace(size_t count, std::string_view text) {
    out_.append(text);
    at_ += count;
    return {};
  }
  Status copy(size_t count) { return replace(count, in_.substr(at_, count)); }

  Status item() {
    switch (in_[at_]) {
      case '\\':
        return escape();
      case '[':
        in_class_ = true;
        SQZ_RETURN_IF_ERROR(copy(starts("[^") ? 2 : 1));
        return starts("]") ? refuse("[]") : Status();
      case '(':
        return group();
      case '{':
        return interval();
      default:
        return copy(1);
    }
  }

  Status class_item() {
    if (starts("[") || starts("&&")) return refuse("nested or intersected set");
    if (starts("\\")) return escape();
    if (starts("]")) in_class_ = false;
    return copy(1);
  }

  Status group() {
    for (std::string_view plain : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!"}) {
      if (starts(plain)) return copy(plain.size());
    }
    if (!starts("(?")) return copy(1);
    // Ruby's (?i) in mid-pattern opens a group up to the enclosing one's end; only the forms that
    // both engines read alike are let through.
    const size_t end = in_.find_first_not_of("im-", at_ + 2);
    const bool whole = end != std::string_view::npos && in_[end] == ')' && at_ == 0;
    if (end == std::string_view::npos || end == at_ + 2 || !(in_[end] == ':' || whole)) {
      return refuse("(?...)");
    }
    for (char flag : in_.substr(at_, end + 1 - at_)) out_.push_back(flag == 'm' ? 's' : flag);
    at_ = end + 1;
    return {};
  }

  Status interval() {
    const size_t end = in_.find('}', at_);
    const bool numeric = end != std::string_view::npos &&
                         in_.substr(at_ + 1, end - at_ - 1).find_first_not_of("0123456789,") ==
                             std::string_view::npos;
    if (!numeric) return refuse("{");
    const std::string_view body = in_.substr(at_ + 1, end - at_ - 1);
    const char after = end + 1 < in_.size() ? in_[end + 1] : '\0';
    if (after == '+' || (after == '?' && body.find(',') == std::string_view::npos)) {
      return refuse("{n,m} with a suffix");
    }
    return replace(end + 1 - at_, concat(body.starts_with(',') ? "{0" : "{", body, '}'));
  }

  Status escape() {
    if (at_ + 1 >= in_.size()) return refuse("\\ at the end");
    const char c = in_[at_ + 1];
    if (!std::isalpha(static_cast<unsigned char>(c))) return copy(2);
    switch (c) {
      case 's':
        return replace(2, in_class_ ? std::string(kSpaces) : concat('[', kSpaces, ']'));
      case 'S':
        return replace(2, in_class_ ? std::string(kNotSpaces) : concat("[^", kSpaces, ']'));
      case 'w':
        return replace(
            2, in_class_ ? concat(kWord, kNewLetters) : concat('[', kWord, kNewLetters, ']'));
      case 'W':
        if (in_class_) return refuse("\\W in a set");
        return replace(2, concat("[^", kWord, kNewLetters, ']'));
      case 'v':
        return replace(2, "\\x{b}");
      case 'u':
        return code_point();
      case 'p':
      case 'P': {
        const size_t end = in_.find('}', at_);
        if (end == std::string_view::npos || in_[at_ + 2] != '{') return refuse("\\p");
        return property(end + 1 - at_);
      }
      case 'A':
      case 'z':
        if (in_class_) return refuse(in_.substr(at_, 2));
        return copy(2);
      default:
        if (std::string_view("dDnrtfaex").find(c) == std::string_view::npos) {
          return refuse(in_.substr(at_, 2));
        }
        return copy(2);
    }
  }

  Status property(size_t length) {
    const std::string_view name = in_.substr(at_, length);
    const std::string_view fresh = name == "\\p{L}"   ? kNewLetters
                                   : name == "\\p{N}" ? kNewNumbers
                                                      : std::string_view();
    const bool set = !in_class_ && !fresh.empty();
    return replace(length, concat(set ? "[" : "", name, fresh, set ? "]" : ""));
  }

  Status code_point() {
    const std::string_view digits = in_.substr(at_ + 2, 4);
    if (digits.size() != 4 ||
        digits.find_first_not_of("0123456789abcdefABCDEF") != std::string_view::npos) {
      return refuse("\\u");
    }
    return replace(6, concat("\\x{", digits, '}'));
  }

  std::string_view in_;
  std::string_view label_;
  size_t at_ = 0;
  bool in_class_ = false;
  std::string out_;
};

}  // namespace

Result<std::string> translate_pattern(std::string_view pattern, std::string_view label) {
  return Translator(pattern, label).run();
}

std::string escape_pattern(std::string_view literal) {
  std::string out;
  for (char c : literal) {
    if (std::ispunct(static_cast<unsigned char>(c)) && static_cast<unsigned char>(c) < 0x80) {
      out.push_back('\\');
    }
    out.push_back(c);
  }
  return out;
}

}  // namespace sqz
