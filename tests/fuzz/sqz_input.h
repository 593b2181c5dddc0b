// .sqz files as inputs. Hashes stand in the way of mutations, and one byte more or less makes
// everything behind it wrong, so inputs are mutated in place and their hashes repaired: it is the
// code behind the checks that is to be reached.
#pragma once

#include <array>
#include <cstring>

#include "formats/base/hash.h"
#include "formats/safetensors.h"
#include "tests/fuzz/memory_env.h"
#include "tests/fuzz/mutate.h"

namespace sqz {

// A file, and what a target may take its settings from: the bytes after the hash of the header,
// which ends 16 bytes after a multiple of 64.
struct SqzInput {
  static constexpr size_t kSettings = 8;
  std::vector<std::byte> file;
  std::array<uint8_t, kSettings> settings{};

  explicit SqzInput(std::span<const uint8_t> input) {
    const auto bytes = std::as_bytes(input);
    const size_t extra = bytes.size() % 64 == 16 + kSettings ? kSettings : 0;
    file.assign(bytes.begin(), bytes.end() - static_cast<std::ptrdiff_t>(extra));
    if (extra > 0) std::copy(input.end() - kSettings, input.end(), settings.begin());
    repair();
  }

 private:
  void write_at(size_t offset, const void* data, size_t bytes) {
    std::memcpy(file.data() + offset, data, bytes);
  }

  // Each tensor's hash, where the header has one of its name, and the header's.
  void repair() {
    MemoryEnv env(file);
    const auto opened = env.open_read("");
    const auto header = read_safetensors_header(**opened);
    if (!header.ok() || header->tensors.empty()) return;
    const std::string_view text(reinterpret_cast<const char*>(file.data()), header->data_offset);
    for (const TensorInfo& tensor : header->tensors) {
      const std::string entry = "\\\"" + tensor.name + "\\\":\\\"";  // JSON in a JSON string
      const size_t at = text.find(entry);
      if (at == std::string_view::npos || at + entry.size() + 16 > text.size()) continue;
      const std::string hash = hex(xxh3_64(std::span(file).subspan(tensor.offset, tensor.bytes)));
      write_at(at + entry.size(), hash.data(), hash.size());
    }
    const auto hash = xxh3_128(std::span(file).first(header->data_offset));
    const TensorInfo& last = header->tensors.back();
    if (last.bytes == hash.size()) write_at(last.offset, hash.data(), hash.size());
  }
};

}  // namespace sqz

// Not inline: nothing but libFuzzer names it.
extern "C" size_t LLVMFuzzerCustomMutator(uint8_t* data, size_t size, size_t max_size,
                                          unsigned seed) {
  constexpr size_t kSettings = sqz::SqzInput::kSettings, kLeast = 64;
  uint64_t length = 0;
  if (size < kLeast) return LLVMFuzzerMutate(data, size, max_size);
  std::memcpy(&length, data, sizeof(length));
  std::minstd_rand random(seed);
  const auto choice = random() % 8;
  if (length >= size - kLeast || choice == 0) return LLVMFuzzerMutate(data, size, max_size);
  if (choice < 3) {
    if (size % 64 == 16 && size + kSettings <= max_size) {
      std::fill_n(data + size, kSettings, 0);
      size += kSettings;
    }
    sqz::mutate_part(data, size - kSettings, kSettings, 0);
  } else if (choice < 6) {
    sqz::MemoryEnv env(std::as_bytes(std::span(data, std::min(size, size / 64 * 64 + 16))));
    const auto header = sqz::read_safetensors_header(**env.open_read(""));
    size_t first = 8 + static_cast<size_t>(length), end = size;
    if (header.ok() && !header->tensors.empty()) {  // small tensors as often as large ones
      const sqz::TensorInfo& tensor = header->tensors[random() % header->tensors.size()];
      first = tensor.offset;
      end = first + tensor.bytes;
    }
    sqz::mutate_numbers(data, first, end, random);
  } else {
    sqz::mutate_part(data, 8, static_cast<size_t>(length), ' ');  // the header's text
  }
  return size;
}
