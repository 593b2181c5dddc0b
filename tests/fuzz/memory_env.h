// An Env with read-only files in memory: what a fuzz target parses.
#pragma once

#include <cstring>
#include <utility>
#include <vector>

#include "formats/base/file.h"

namespace sqz {

class MemoryEnv : public Env {
 public:
  // One file, whatever the path.
  explicit MemoryEnv(std::span<const std::byte> bytes) : files_{{"", bytes}} {}
  // A path is the first file whose name it ends with.
  using Files = std::vector<std::pair<std::string, std::span<const std::byte>>>;
  explicit MemoryEnv(Files files) : files_(std::move(files)) {}

  Result<std::unique_ptr<ReadFile>> open_read(const std::string& path) override {
    for (const auto& [name, bytes] : files_) {
      if (path.ends_with(name)) return std::unique_ptr<ReadFile>(new File(path, bytes));
    }
    return Status(Code::kNotFound, path);
  }
  bool exists(const std::string& path) override { return open_read(path).ok(); }
  Result<std::unique_ptr<WriteFile>> create(const std::string&, Temporary) override {
    return read_only();
  }
  Status rename(const std::string&, const std::string&, bool) override { return read_only(); }
  Status remove(const std::string&) override { return read_only(); }
  Status sync_directory(const std::string&) override { return read_only(); }

 private:
  static Status read_only() { return {Code::kIo, "memory file: read-only"}; }

  struct View : Mapping {
    explicit View(std::span<const std::byte> bytes) { bytes_ = bytes; }
  };

  class File : public ReadFile {
   public:
    File(std::string path, std::span<const std::byte> bytes)
        : path_(std::move(path)), bytes_(bytes) {}
    const std::string& path() const override { return path_; }
    uint64_t size() const override { return bytes_.size(); }
    Status read(uint64_t offset, std::span<std::byte> out) const override {
      if (offset > bytes_.size() || out.size() > bytes_.size() - offset) {
        return {Code::kCorrupt, concat(path_, ": file length: found ", bytes_.size(), " bytes")};
      }
      if (!out.empty()) std::memcpy(out.data(), bytes_.data() + offset, out.size());
      return {};
    }
    Result<std::unique_ptr<Mapping>> map() const override {
      return std::unique_ptr<Mapping>(new View(bytes_));
    }

   private:
    std::string path_;
    std::span<const std::byte> bytes_;
  };

  Files files_;
};

}  // namespace sqz
