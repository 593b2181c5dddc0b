#include "formats/sqz_checksums.h"

#include <algorithm>

#include "formats/base/hash.h"
#include "formats/json_fields.h"
#include "formats/sqz_container.h"

namespace sqz {
namespace {

// Neither NaN nor infinity: no number has an exponent of all ones, which `mask` cuts out.
template <class T>
bool all_finite(std::span<const std::byte> bytes, T mask) {
  const auto* x = reinterpret_cast<const T*>(bytes.data());
  T special = 0;
  for (size_t i = 0; i < bytes.size() / sizeof(T); ++i) {
    special |= static_cast<T>((x[i] & mask) == mask);
  }
  return special == 0;
}

bool finite_floats(const TensorInfo& tensor, std::span<const std::byte> bytes) {
  switch (tensor.dtype) {
    case DType::kBF16:
      return all_finite<uint16_t>(bytes, 0x7f80);
    case DType::kF16:
      return all_finite<uint16_t>(bytes, 0x7c00);
    case DType::kF32:  // thresholds may be -infinity: check_calibration() sees to them
      return tensor.name.starts_with("calibration.") || all_finite<uint32_t>(bytes, 0x7f800000);
    default:
      return true;
  }
}

}  // namespace

void note(Problems& problems, std::string text) {
  if (problems.size() < kMaxProblems) problems.push_back(std::move(text));
}

Status first_of(const Problems& problems, const std::string& path, Code code) {
  return problems.empty() ? Status() : Status(code, concat(path, ": ", problems.front()));
}

Checksums read_checksums(const SafetensorsHeader& header, const std::string& path,
                         Problems& problems) {
  const std::string label = path + ": __metadata__: checksums";
  Result<JsonDocument> parsed = parse_json(header.metadata.at(kChecksumsKey), label);
  if (!parsed.ok()) {
    note(problems, parsed.status().message());
    return {};
  }
  const JsonValue& object = parsed->root();
  if (!object.is_object()) {
    note(problems, unexpected(object, label, "an object").message());
    return {};
  }
  Checksums out;
  for (const JsonValue& member : object.items()) {
    if (!member.is_string() || header.find(member.key()) == nullptr) {
      note(problems, bad_field(label, member.key(), found_text(member),
                               "the name of a tensor, and a string"));
      continue;
    }
    out.emplace(member.key(), member.string());
  }
  return out;
}

void check_bytes(const TensorInfo& tensor, std::span<const std::byte> file,
                 const Checksums& checksums, const std::function<void(size_t)>& advance,
                 Problems& problems) {
  if (tensor.name == kHeaderHashName) return;
  const bool padding = tensor.name.starts_with(kPaddingPrefix);
  const auto stored = checksums.find(tensor.name);
  const auto data =
      file.subspan(static_cast<size_t>(tensor.offset), static_cast<size_t>(tensor.bytes));
  Xxh3Stream hash;
  bool finite = true, zero = true;
  for (size_t from = 0; from < data.size(); from += kChecksumChunk) {
    const auto chunk = data.subspan(from, std::min(kChecksumChunk, data.size() - from));
    if (padding) {
      zero &= std::all_of(chunk.begin(), chunk.end(), [](std::byte b) { return b == std::byte{}; });
    } else {
      hash.update(chunk);
      finite &= finite_floats(tensor, chunk);
    }
    if (advance) advance(chunk.size());
  }
  const std::string name = in_quotes(tensor.name);
  if (padding) {
    if (!zero) note(problems, concat("tensor ", name, ": found other bytes, expected zeros"));
    return;
  }
  const std::string found = hex(hash.digest());
  if (stored == checksums.end() || stored->second != found) {
    note(problems, bad_field("tensor " + name, "XXH3-64", found,
                             stored == checksums.end() ? "none: it is not in the checksums"
                                                       : in_quotes(stored->second)));
  }
  if (!finite) {
    note(problems, concat("tensor ", name, ": found NaN or infinity, expected finite numbers"));
  }
}

VerifyReport check_tensors(const SqzContainer& container) {
  VerifyReport report;
  report.checked = std::ssize(container.header.tensors);
  const Checksums checksums = read_checksums(container.header, container.path, report.problems);
  for (const TensorInfo& tensor : container.header.tensors) {
    check_bytes(tensor, container.bytes, checksums, {}, report.problems);
  }
  return report;
}

}  // namespace sqz
