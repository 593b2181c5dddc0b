// Any bytes as a capture: opened and every layer read, or refused.
#include <cstdint>

#include "formats/capture.h"
#include "tests/fuzz/memory_file.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const sqz::MemoryFile file(std::as_bytes(std::span(data, size)));
  const auto capture = sqz::CaptureReader::open(file.path());
  if (!capture.ok()) return 0;
  for (int64_t layer = 0; layer < (*capture)->info().model.layers; ++layer) {
    if (!(*capture)->read_layer(layer).ok()) break;
  }
  return 0;
}
