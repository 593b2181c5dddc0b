// A file in memory that has a path, for what opens files by itself.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <span>
#include <string>

namespace sqz {

class MemoryFile {
 public:
  explicit MemoryFile(std::span<const std::byte> bytes) : fd_(::memfd_create("input", 0)) {
    if (::pwrite(fd_, bytes.data(), bytes.size(), 0) != std::ssize(bytes)) std::abort();
  }
  MemoryFile(const MemoryFile&) = delete;
  ~MemoryFile() { ::close(fd_); }
  std::string path() const { return "/proc/self/fd/" + std::to_string(fd_); }

 private:
  int fd_;
};

}  // namespace sqz
