// What a tokenizer that was loaded from an input has to survive.
#pragma once

#include "formats/tokenizer_files.h"

// `input`: its end is text, too, whether UTF-8 or not.
inline void use_tokenizer(sqz::Result<std::unique_ptr<sqz::Tokenizer>> tokenizer,
                          std::string_view input) {
  if (!tokenizer.ok()) return;
  const std::string_view end = input.substr(input.size() - std::min<size_t>(input.size(), 64));
  for (const std::string_view text :
       {std::string_view("It's 12345 \xc3\xa9t\xc3\xa9s\r\n\n  <s>x\xef\xac\x81"), end}) {
    std::vector<int32_t> ids;
    if ((*tokenizer)->encode(text, true, ids).ok()) (void)(*tokenizer)->decode(ids, true).ok();
  }
}
