// Oniguruma (Ruby dialect) to PCRE2, for the constructs that tokenizer.json files use.
#include <cctype>

#include "formats/tokenizer_regex.h"

namespace sqz {
namespace {

// Unicode White_Space. PCRE2's own \s adds U+180E, which left that property in Unicode 6.3.
constexpr char kSpaces[] =
    "\\x{9}-\\x{d}\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}"
    "\\x{205f}\\x{3000}";
// Characters of Unicode 15 and 16: `tokenizers` knows them, Debian 12's PCRE2 (Unicode 14) does
// not. Where PCRE2 is newer they are in its properties already.
constexpr char kNewUpper[] = "\\x{1c89}\\x{a7cb}-\\x{a7cc}\\x{a7da}\\x{a7dc}\\x{10d50}-\\x{10d65}";
constexpr char kNewLower[] =
    "\\x{1c8a}\\x{a7cd}\\x{a7db}\\x{10d70}-\\x{10d85}\\x{1df25}-\\x{1df2a}";
constexpr char kNewModifiers[] =
    "\\x{10d4e}\\x{10d6f}\\x{16d40}-\\x{16d42}\\x{16d6b}-\\x{16d6c}\\x{1e030}-\\x{1e06d}"
    "\\x{1e4eb}";
constexpr char kNewOtherLetters[] =
    "\\x{105c0}-\\x{105f3}\\x{10d4a}-\\x{10d4d}\\x{10d4f}\\x{10ec2}-\\x{10ec4}"
    "\\x{1123f}-\\x{11240}\\x{11380}-\\x{11389}\\x{1138b}\\x{1138e}\\x{11390}-\\x{113b5}"
    "\\x{113b7}\\x{113d1}\\x{113d3}\\x{11bc0}-\\x{11be0}\\x{11f02}\\x{11f04}-\\x{11f10}"
    "\\x{11f12}-\\x{11f33}\\x{1342f}\\x{13441}-\\x{13446}\\x{13460}-\\x{143fa}"
    "\\x{16100}-\\x{1611d}\\x{16d43}-\\x{16d6a}\\x{18cff}\\x{1b132}\\x{1b155}"
    "\\x{1e4d0}-\\x{1e4ea}\\x{1e5d0}-\\x{1e5ed}\\x{1e5f0}\\x{2b739}\\x{2ebf0}-\\x{2ee5d}"
    "\\x{31350}-\\x{323af}";
constexpr char kNewMarks[] =
    "\\x{897}\\x{cf3}\\x{ece}\\x{10d69}-\\x{10d6d}\\x{10efc}-\\x{10eff}\\x{11241}"
    "\\x{113b8}-\\x{113c0}\\x{113c2}\\x{113c5}\\x{113c7}-\\x{113ca}\\x{113cc}-\\x{113d0}"
    "\\x{113d2}\\x{113e1}-\\x{113e2}\\x{11f00}-\\x{11f01}\\x{11f03}\\x{11f34}-\\x{11f3a}"
    "\\x{11f3e}-\\x{11f42}\\x{11f5a}\\x{13440}\\x{13447}-\\x{13455}\\x{1611e}-\\x{1612f}"
    "\\x{1e08f}\\x{1e4ec}-\\x{1e4ef}\\x{1e5ee}-\\x{1e5ef}";
constexpr char kNewDigits[] =
    "\\x{10d40}-\\x{10d49}\\x{116d0}-\\x{116e3}\\x{11bf0}-\\x{11bf9}\\x{11f50}-\\x{11f59}"
    "\\x{16130}-\\x{16139}\\x{16d70}-\\x{16d79}\\x{1ccf0}-\\x{1ccf9}\\x{1e4f0}-\\x{1e4f9}"
    "\\x{1e5f1}-\\x{1e5fa}";
constexpr char kNewOtherNumbers[] = "\\x{1d2c0}-\\x{1d2d3}";
constexpr char kNewPunctuation[] =
    "\\x{1b4e}-\\x{1b4f}\\x{1b7f}\\x{10d6e}\\x{113d4}-\\x{113d5}\\x{113d7}-\\x{113d8}"
    "\\x{11b00}-\\x{11b09}\\x{11be1}\\x{11f43}-\\x{11f4f}\\x{16d6d}-\\x{16d6f}\\x{1e5ff}";
constexpr char kNewSymbols[] =
    "\\x{2427}-\\x{2429}\\x{2ffc}-\\x{2fff}\\x{31e4}-\\x{31e5}\\x{31ef}\\x{10d8e}-\\x{10d8f}"
    "\\x{1cc00}-\\x{1ccef}\\x{1cd00}-\\x{1ceb3}\\x{1f6dc}\\x{1f774}-\\x{1f776}"
    "\\x{1f77b}-\\x{1f77f}\\x{1f7d9}\\x{1f8b2}-\\x{1f8bb}\\x{1f8c0}-\\x{1f8c1}"
    "\\x{1fa75}-\\x{1fa77}\\x{1fa87}-\\x{1fa89}\\x{1fa8f}\\x{1faad}-\\x{1faaf}"
    "\\x{1fabb}-\\x{1fabf}\\x{1fac6}\\x{1face}-\\x{1facf}\\x{1fada}-\\x{1fadc}\\x{1fadf}"
    "\\x{1fae8}-\\x{1fae9}\\x{1faf7}-\\x{1faf8}\\x{1fbcb}-\\x{1fbef}";
constexpr char kNewHan[] = "\\x{2b739}\\x{2ebf0}-\\x{2ee5d}\\x{31350}-\\x{323af}";

struct Property {
  std::string_view name;
  std::string members;
};

// Gives the members of the property `name`, and nothing if it is not known to mean the same in both
// engines. PCRE2's \p{Han} has punctuation that is used with Han, too.
std::string members_of(std::string_view name) {
  const Property known[] = {
      {"L", concat("\\p{L}", kNewUpper, kNewLower, kNewModifiers, kNewOtherLetters)},
      {"Lu", concat("\\p{Lu}", kNewUpper)},
      {"Ll", concat("\\p{Ll}", kNewLower)},
      {"Lt", "\\p{Lt}"},
      {"Lm", concat("\\p{Lm}", kNewModifiers)},
      {"Lo", concat("\\p{Lo}", kNewOtherLetters)},
      {"M", concat("\\p{M}", kNewMarks)},
      {"N", concat("\\p{N}", kNewDigits, kNewOtherNumbers)},
      {"Nd", concat("\\p{Nd}", kNewDigits)},
      {"P", concat("\\p{P}", kNewPunctuation)},
      {"S", concat("\\p{S}", kNewSymbols)},
      {"Z", "\\p{Z}"},
      {"Zs", "\\p{Zs}"},
      {"Han", concat("\\p{sc:Han}", kNewHan)}};
  for (const Property& property : known) {
    if (property.name == name) return property.members;
  }
  return {};
}

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
  Status replace_by_set(size_t count, std::string_view members) {
    return in_class_ ? replace(count, members) : replace(count, concat('[', members, ']'));
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
    if (known == "\\s") return replace_by_set(2, kSpaces);
    if (known == "\\S" && !in_class_) return replace(2, concat("[^", kSpaces, ']'));
    if (known == "\\d") return replace_by_set(2, members_of("Nd"));
    const bool letter = std::isalpha(static_cast<unsigned char>(known[1]));
    return letter && std::string_view("nrt").find(known[1]) == std::string_view::npos
               ? refuse(known)
               : copy(2);
  }

  Status property() {
    const size_t end = in_.find('}', at_);
    if (end == std::string_view::npos || in_[at_ + 2] != '{') return refuse("\\p");
    const std::string_view all = in_.substr(at_, end + 1 - at_);
    const std::string members = members_of(all.substr(3, all.size() - 4));
    const bool others = all[1] == 'P';
    if (members.empty() || (others && in_class_)) return refuse(all);
    if (others) return replace(all.size(), concat("[^", members, ']'));
    return replace_by_set(all.size(), members);
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
