// Any bytes as a tokenizer.json: loaded and used, or refused.
#include "tests/fuzz/use_tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  use_tokenizer(sqz::load_json_tokenizer(bytes, "tokenizer.json"), bytes);
  return 0;
}
