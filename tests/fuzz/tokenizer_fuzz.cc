// Any bytes as a tokenizer.json: loaded and used, or refused.
#include "formats/tokenizer.h"
#include "tests/fuzz/memory_env.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sqz::MemoryEnv env(std::as_bytes(std::span(data, size)));
  auto tokenizer = sqz::Tokenizer::load("fuzz/tokenizer.json", env);
  if (!tokenizer.ok()) return 0;
  std::vector<int32_t> ids;
  if ((*tokenizer)->encode("It's 12345 \xc3\xa9t\xc3\xa9s\r\n\n  <s>x", true, ids).ok()) {
    (void)(*tokenizer)->decode(ids).ok();
  }
  return 0;
}
