// Any bytes as a safetensors file: a header or an error, and every range it names is in the file.
#include <cstdlib>

#include "formats/safetensors.h"
#include "tests/fuzz/memory_env.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  sqz::MemoryEnv env(bytes);
  auto file = env.open_read("fuzz.safetensors");
  auto header = sqz::read_safetensors_header(**file);
  if (!header.ok()) return 0;
  volatile unsigned sum = 0;
  for (const sqz::TensorInfo& tensor : header->tensors) {
    if (header->find(tensor.name) != &tensor) std::abort();
    for (std::byte b : bytes.subspan(tensor.offset, tensor.bytes)) {
      sum = sum + std::to_integer<unsigned>(b);
    }
  }
  return 0;
}
