#include <utf8proc.h>

#include <algorithm>
#include <array>

#include "formats/tokenizer_steps.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

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

void normalize_part(std::string_view part, std::vector<int32_t>& codes, std::string& out) {
  codes.clear();
  for (size_t offset = 0; offset < part.size();) {
    const auto code = static_cast<int32_t>(next_char(part, offset));
    std::array<int32_t, 32> pieces;  // the longest decomposition of one character has 18
    int boundary = 0;
    const auto count = utf8proc_decompose_char(code, pieces.data(), std::ssize(pieces),
                                               UTF8PROC_DECOMPOSE, &boundary);
    codes.insert(codes.end(), pieces.begin(),
                 pieces.begin() + std::clamp<std::ptrdiff_t>(count, 0, std::ssize(pieces)));
  }
  sort_marks(codes);
  // utf8proc drops U+11A7 behind a Hangul syllable. Nothing composes with it or across it.
  constexpr int32_t kBeforeFinals = 0x11a7;
  for (auto begin = codes.begin();; ++begin) {
    const auto end = std::find(begin, codes.end(), kBeforeFinals);
    utf8proc_ssize_t length = end - begin;
    if (length > 0) {
      constexpr auto kCompose = static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE);
      length = utf8proc_normalize_utf32(&*begin, length, kCompose);
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

}  // namespace

// ASCII never changes, and only its last character can take part in what follows: the text is
// normalised in parts of one ASCII character and the run of others behind it.
void normalize_nfc(std::string& text) {
  if (std::all_of(text.begin(), text.end(), is_ascii)) return;
  std::string out;
  out.reserve(text.size());
  std::vector<int32_t> codes;
  for (auto at = text.begin(); at != text.end();) {
    auto begin = std::find_if_not(at, text.end(), is_ascii);
    const auto end = std::find_if(begin, text.end(), is_ascii);
    if (begin != at && begin != text.end()) --begin;
    out.append(at, begin);
    normalize_part(std::string_view(begin, end), codes, out);
    at = end;
  }
  text = std::move(out);
}

}  // namespace sqz
