// An input as a file with a path, for what opens files by itself.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <span>
#include <string>

namespace sqz {

class InputFile {
 public:
  explicit InputFile(std::span<const std::byte> bytes)
      : path_(std::filesystem::temp_directory_path() / "sqz_fuzz_XXXXXX") {
    const int fd = ::mkstemp(path_.data());
    if (::write(fd, bytes.data(), bytes.size()) != std::ssize(bytes)) std::abort();
    ::close(fd);
  }
  InputFile(const InputFile&) = delete;
  ~InputFile() { ::unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace sqz
