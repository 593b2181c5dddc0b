// Files that must not outlive the process. A process that a signal ends removes them in its
// handler.
#pragma once

#include <string>

namespace sqz {

// Up to 2048 names are remembered at a time, others are ignored. Thread-safe.
void remember_temporary(const std::string& path);
void forget_temporary(const std::string& path);

// Removes the files with these names. May be called in a signal handler.
void remove_temporaries();

// The name of a file that is removed with this object, or by remove_temporaries().
class TemporaryName {
 public:
  explicit TemporaryName(std::string path);
  ~TemporaryName();
  TemporaryName(TemporaryName&& other) noexcept;
  TemporaryName& operator=(TemporaryName&&) = delete;

  const std::string& path() const { return path_; }

 private:
  std::string path_;  // empty once it was moved from
};

}  // namespace sqz
