// Any bytes as a tokenizer.json or a SentencePiece model: loaded and used, or refused.
#include "formats/tokenizer_files.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  auto tokenizer = bytes.starts_with('{') ? sqz::load_json_tokenizer(bytes, "tokenizer.json")
                                          : sqz::load_sentencepiece(bytes, "tokenizer.model");
  if (!tokenizer.ok()) return 0;
  std::vector<int32_t> ids;
  if ((*tokenizer)
          ->encode("It's 12345 \xc3\xa9t\xc3\xa9s\r\n\n  <s>x\xef\xac\x81", true, ids)
          .ok()) {
    (void)(*tokenizer)->decode(ids, true).ok();
  }
  return 0;
}
