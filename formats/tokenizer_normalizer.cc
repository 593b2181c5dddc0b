#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "formats/tokenizer_steps.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr int kOptions[] = {  // by UnicodeForm
    UTF8PROC_STABLE | UTF8PROC_COMPOSE, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE,
    UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT,
    UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT};

int combining_class(int32_t code) {
  return utf8proc_get_property(code)->combining_class;
}

// utf8proc's own reordering is an insertion sort: quadratic on a long run of combining marks.
void sort_marks(std::vector<int32_t>& codes) {
  for (auto it = codes.begin(); it != codes.end();) {
    if (combining_class(*it) == 0) {
      ++it;
      continue;
    }
    const auto end =
        std::find_if(it, codes.end(), [](int32_t code) { return combining_class(code) == 0; });
    std::stable_sort(it, end,
                     [](int32_t a, int32_t b) { return combining_class(a) < combining_class(b); });
    it = end;
  }
}

void normalize_part(std::string_view part, int options, std::vector<int32_t>& codes,
                    std::string& out) {
  codes.clear();
  for (size_t offset = 0; offset < part.size();) {
    const auto code = static_cast<int32_t>(next_char(part, offset));
    // The longest decomposition of one character has 18 code points.
    std::array<int32_t, 32> pieces;
    int boundary = 0;
    const auto count = utf8proc_decompose_char(
        code, pieces.data(), static_cast<utf8proc_ssize_t>(pieces.size()),
        static_cast<utf8proc_option_t>((options & ~UTF8PROC_COMPOSE) | UTF8PROC_DECOMPOSE),
        &boundary);
    if (count <= 0 || count > static_cast<utf8proc_ssize_t>(pieces.size())) {
      codes.push_back(code);
    } else {
      codes.insert(codes.end(), pieces.begin(), pieces.begin() + count);
    }
  }
  sort_marks(codes);
  // utf8proc drops U+11A7 behind a Hangul syllable. Nothing composes with it or across it.
  constexpr int32_t kBeforeFinals = 0x11a7;
  for (auto begin = codes.begin();; ++begin) {
    const auto end = std::find(begin, codes.end(), kBeforeFinals);
    utf8proc_ssize_t length = end - begin;
    if ((options & UTF8PROC_COMPOSE) && length > 0) {
      length = utf8proc_normalize_utf32(&*begin, length, static_cast<utf8proc_option_t>(options));
    }
    for (utf8proc_ssize_t i = 0; i < length; ++i) {
      append_utf8(static_cast<uint32_t>(begin[i]), out);
    }
    if (end == codes.end()) return;
    append_utf8(kBeforeFinals, out);
    begin = end;
  }
}

bool is_ascii(char c) {
  return static_cast<unsigned char>(c) < 0x80;
}

Normalizer unicode(UnicodeForm form) {
  return [form](std::string text) { return unicode_normalize(std::move(text), form); };
}

Result<Normalizer> replace_normalizer(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const Regex pattern, parse_pattern(object));
  SQZ_ASSIGN_OR_RETURN(const std::string content, object.string("content"));
  return Normalizer([pattern, content](std::string text) -> Result<std::string> {
    RegexMatcher matcher(pattern);
    SQZ_RETURN_IF_ERROR(replace_matches(matcher, content, text));
    return text;
  });
}

}  // namespace

// ASCII never changes, and only its last character can take part in what follows: the text is
// normalised in parts of one ASCII character and the run of others behind it.
std::string unicode_normalize(std::string text, UnicodeForm form) {
  const int options = kOptions[static_cast<size_t>(form)];
  const auto first = std::find_if_not(text.begin(), text.end(), is_ascii);
  if (first == text.end()) return text;
  std::string out;
  out.reserve(text.size());
  std::vector<int32_t> codes;
  for (auto at = text.begin(); at != text.end();) {
    auto begin = std::find_if_not(at, text.end(), is_ascii);
    const auto end = std::find_if(begin, text.end(), is_ascii);
    if (begin != at && begin != text.end()) --begin;
    out.append(at, begin);
    normalize_part(std::string_view(begin, end), options, codes, out);
    at = end;
  }
  return out;
}

Result<Normalizer> parse_normalizer(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string type, object.string("type"));
  if (type == "NFC") return unicode(UnicodeForm::kNfc);
  if (type == "NFD") return unicode(UnicodeForm::kNfd);
  if (type == "NFKC") return unicode(UnicodeForm::kNfkc);
  if (type == "NFKD") return unicode(UnicodeForm::kNfkd);
  if (type == "Replace") return replace_normalizer(object);
  if (type == "Prepend") {
    SQZ_ASSIGN_OR_RETURN(const std::string prefix, object.string("prepend"));
    return Normalizer([prefix](std::string text) { return text.empty() ? text : prefix + text; });
  }
  if (type != "Sequence") {
    return object.unsupported("type", concat("normalizer ", in_quotes(type)));
  }
  SQZ_ASSIGN_OR_RETURN(const auto steps, object.each("normalizers", parse_normalizer));
  return Normalizer([steps](std::string text) -> Result<std::string> {
    for (const Normalizer& step : steps) {
      SQZ_ASSIGN_OR_RETURN(text, step(std::move(text)));
    }
    return text;
  });
}

Result<Regex> parse_pattern(const JsonObject& owner) {
  SQZ_ASSIGN_OR_RETURN(const JsonObject pattern, owner.object("pattern"));
  const bool literal = !pattern.has("Regex");
  SQZ_ASSIGN_OR_RETURN(const std::string text, pattern.string(literal ? "String" : "Regex"));
  return Regex::compile(literal ? escape_pattern(text) : text,
                        concat(owner.file, ": ", owner.name_of("pattern")));
}

}  // namespace sqz
