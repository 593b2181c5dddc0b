// Any bytes as a tokenizer.json: loaded and used, or refused.
#include <cstdint>

#include "formats/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  const auto tokenizer = sqz::Tokenizer::parse(bytes, "tokenizer.json");
  if (!tokenizer.ok()) return 0;
  // The end of the input is text, too, whether UTF-8 or not.
  const std::string_view end = bytes.substr(size - std::min<size_t>(size, 64));
  for (const std::string_view text :
       {std::string_view("It's 12345 \xc3\xa9t\xc3\xa9s\r\n\n  <s>x\xef\xac\x81"), end}) {
    std::vector<int32_t> ids;
    if ((*tokenizer)->encode(text, true, ids).ok()) (void)(*tokenizer)->decode(ids, true).ok();
  }
  return 0;
}
