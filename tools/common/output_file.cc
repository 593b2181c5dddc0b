#include "tools/common/output_file.h"

#include <filesystem>
#include <random>

#include "formats/base/file.h"
#include "formats/base/hash.h"

namespace sqz {

namespace fs = std::filesystem;

Status check_output(const std::string& path, bool force, const std::vector<std::string>& inputs) {
  std::error_code error;
  if (path.empty()) return {Code::kInvalidArgument, "-o: found no name, expected that of a file"};
  if (fs::is_directory(path, error)) {
    return {Code::kInvalidArgument, concat(path, ": is a folder; give the name of a file with -o")};
  }
  for (const std::string& input : inputs) {
    if (path != input && !fs::equivalent(path, input, error)) continue;
    return {Code::kInvalidArgument,
            concat(path, ": is an input and the output; give another name")};
  }
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty() && !fs::is_directory(folder, error)) {
    return {Code::kInvalidArgument,
            concat(path, ": there is no folder ", folder.string(), "; create it first")};
  }
  // Only an attempt shows a read-only file system. The temporary file is removed at once.
  const Status status = AtomicFile::create(Env::posix(), path, force).status();
  return status.code() == Code::kNotFound ? Status(Code::kIo, status.message()) : status;
}

std::string unique_name(const std::string& prefix) {
  std::random_device random;
  return prefix + hex(uint64_t{random()} << 32 | random());
}

}  // namespace sqz
