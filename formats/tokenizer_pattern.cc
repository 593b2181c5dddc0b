// Oniguruma (Ruby dialect) to PCRE2, for the constructs that tokenizer.json files use.
#include <cctype>

#include "formats/tokenizer_regex.h"

namespace sqz {
namespace {

// Unicode White_Space. PCRE2's own \s adds U+180E, which left that property in Unicode 6.3.
constexpr char kSpaces[] =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";
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
    for (std::string_view known : {"(?:", "(?i:", "(?=", "(?!", "(?>", "(?<=", "(?<!"}) {
      if (starts(known)) return copy(known.size());
    }
    return starts("(?") ? refuse("(?...)") : copy(1);
  }

  Status interval() {
    const size_t end = in_.find('}', at_);
    const std::string_view body = in_.substr(at_ + 1, end - at_ - 1);
    if (end == std::string_view::npos || body.starts_with(',') ||
        body.find_first_not_of("0123456789,") != std::string_view::npos) {
      return refuse("{");
    }
    const char after = end + 1 < in_.size() ? in_[end + 1] : '\0';
    if (after == '+' || (after == '?' && body.find(',') == std::string_view::npos)) {
      return refuse("{n,m} with a suffix");
    }
    return copy(end + 1 - at_);
  }

  Status escape() {
    const std::string_view known = in_.substr(at_, 2);
    if (known.size() < 2) return refuse("\\ at the end");
    if (known == "\\p" || known == "\\P") return property();
    if (known == "\\s")
      return replace(2, in_class_ ? std::string(kSpaces) : concat('[', kSpaces, ']'));
    if (known == "\\S" && !in_class_) return replace(2, concat("[^", kSpaces, ']'));
    const bool letter = std::isalpha(static_cast<unsigned char>(known[1]));
    return letter && std::string_view("dnrt").find(known[1]) == std::string_view::npos
               ? refuse(known)
               : copy(2);
  }

  Status property() {
    const size_t end = in_.find('}', at_);
    if (end == std::string_view::npos || in_[at_ + 2] != '{') return refuse("\\p");
    const std::string_view name = in_.substr(at_, end + 1 - at_);
    const std::string_view fresh = name == "\\p{L}"   ? kNewLetters
                                   : name == "\\p{N}" ? kNewNumbers
                                                      : std::string_view();
    const bool set = !in_class_ && !fresh.empty();
    return replace(name.size(), concat(set ? "[" : "", name, fresh, set ? "]" : ""));
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
