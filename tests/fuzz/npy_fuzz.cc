// Any bytes as a NumPy file: as many token ids as the bytes can hold, or an error.
#include <cstdlib>

#include "formats/npy.h"
#include "tests/fuzz/memory_env.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  sqz::MemoryEnv env(std::as_bytes(std::span(data, size)));
  const auto ids = sqz::read_npy_tokens(env, "fuzz.npy");
  if (ids.ok() && ids->size() * 2 > size) std::abort();
  return 0;
}
