#include "formats/sqz_checksums.h"

#include <algorithm>

#include "formats/base/hash.h"
#include "formats/json_fields.h"
#include "formats/sqz_container.h"

namespace sqz {
namespace {

// Of 16-bit floats whose exponent is `mask`: neither NaN nor infinite.
bool all_finite(std::span<const std::byte> bytes, uint16_t mask) {
  const auto* x = reinterpret_cast<const uint16_t*>(bytes.data());
  uint16_t special = 0;
  for (size_t i = 0; i < bytes.size() / sizeof(uint16_t); ++i) {
    special |= static_cast<uint16_t>((x[i] & mask) == mask);
  }
  return special == 0;
}

// Integers are always finite. Calibration tables may hold -infinity: check_calibration() sees them.
bool finite_floats(const TensorInfo& tensor, std::span<const std::byte> bytes) {
  if (tensor.dtype == DType::kBF16) return all_finite(bytes, 0x7f80);
  if (tensor.dtype == DType::kF16) return all_finite(bytes, 0x7c00);
  return true;
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
    if (member.is_string()) {
      out.emplace(member.key(), member.string());
    } else {
      note(problems, bad_field(label, member.key(), found_text(member), "a string"));
    }
  }
  const auto used = static_cast<size_t>(
      std::count_if(header.tensors.begin(), header.tensors.end(), [&](const TensorInfo& tensor) {
        return tensor.name != kHeaderHashName && object.find(tensor.name) != nullptr;
      }));
  if (used != object.size()) {
    note(problems, concat(label, ": found ", object.size(), " names, expected ", used,
                          ": those of the tensors"));
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
