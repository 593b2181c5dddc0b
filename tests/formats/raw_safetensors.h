// safetensors files taken apart and put together by hand, legal or not.
#pragma once

#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "formats/base/dtype.h"
#include "formats/base/hash.h"
#include "tests/common/temporary_directory.h"

namespace sqz::testing {

inline std::string little_endian(uint64_t value) {
  std::string out(8, '\0');
  for (size_t i = 0; i < 8; ++i) out[i] = static_cast<char>(value >> (8 * i) & 0xff);
  return out;
}

// Length, header, data.
inline std::string safetensors_bytes(const std::string& header, const std::string& data) {
  return little_endian(header.size()) + header + data;
}

// An index file as a list of tensors that a test may change at will.
struct RawIndex {
  struct Tensor {
    std::string name, dtype;
    std::vector<int64_t> shape;
    std::string data;
  };
  std::map<std::string, std::string> metadata;
  std::vector<Tensor> tensors;
  size_t page = 4096;      // where the data starts: a multiple of this
  bool keep_hash = false;  // leave header.xxh3_128 as it is
  std::string tail;        // bytes after the last tensor

  static RawIndex read(const std::string& path) {
    const std::string bytes = read_file(path);
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), 8);
    const auto header = nlohmann::ordered_json::parse(bytes.substr(8, length));
    RawIndex index;
    for (const auto& [name, value] : header.items()) {
      if (name == "__metadata__") {
        index.metadata = value.get<std::map<std::string, std::string>>();
        continue;
      }
      const auto range = value["data_offsets"].get<std::vector<uint64_t>>();
      index.tensors.push_back({name, value["dtype"], value["shape"],
                               bytes.substr(8 + length + range[0], range[1] - range[0])});
    }
    return index;
  }

  Tensor& at(const std::string& name) {
    for (Tensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    throw std::out_of_range(name);
  }
  size_t place(const std::string& name) { return static_cast<size_t>(&at(name) - tensors.data()); }

  template <class T>
  T get(const std::string& name, size_t i) {
    T value;
    std::memcpy(&value, at(name).data.data() + i * sizeof(T), sizeof(T));
    return value;
  }
  template <class T>
  void set(const std::string& name, size_t i, T value) {
    std::memcpy(at(name).data.data() + i * sizeof(T), &value, sizeof(T));
  }

  // The i-th number of a tensor, in the tensor's type.
  void set_number(const std::string& name, size_t i, double value) {
    const std::string& dtype = at(name).dtype;
    if (dtype == "BF16") {
      set(name, i, to_bfloat16(static_cast<float>(value)).bits);
    } else if (dtype == "F32") {
      set(name, i, static_cast<float>(value));
    } else if (dtype == "U32") {
      set(name, i, static_cast<uint32_t>(value));
    } else {
      set(name, i, static_cast<char>(value));
    }
  }

  // A field of a metadata value that is JSON text.
  void set_json(const std::string& key, const std::string& pointer, const nlohmann::json& value) {
    auto json = nlohmann::json::parse(metadata.at(key));
    json[nlohmann::json::json_pointer(pointer)] = value;
    metadata[key] = json.dump();
  }

  // Checksums that fit the tensors as they are now: what is wrong then is wrong in the contents.
  void fix_checksums() {
    auto json = nlohmann::json::parse(metadata.at("checksums"));
    for (const Tensor& tensor : tensors) {
      if (json.contains(tensor.name)) {
        json[tensor.name] = hex(xxh3_64(std::as_bytes(std::span(tensor.data))));
      }
    }
    metadata["checksums"] = json.dump();
  }

  std::string bytes() const {
    nlohmann::ordered_json header;
    header["__metadata__"] = metadata;
    std::string data;
    for (const Tensor& tensor : tensors) {
      header[tensor.name] = {{"dtype", tensor.dtype},
                             {"shape", tensor.shape},
                             {"data_offsets", {data.size(), data.size() + tensor.data.size()}}};
      data += tensor.data;
    }
    std::string text = header.dump();
    text.resize((8 + text.size() + page - 1) / page * page - 8, ' ');
    const std::string head = little_endian(text.size()) + text;
    if (!keep_hash && tensors.back().name == "header.xxh3_128" &&
        tensors.back().data.size() == 16) {
      const auto hash = xxh3_128(std::as_bytes(std::span(head)));
      std::memcpy(data.data() + data.size() - 16, hash.data(), 16);
    }
    return head + data + tail;
  }
};

}  // namespace sqz::testing
