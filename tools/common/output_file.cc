#include "tools/common/output_file.h"

#include <filesystem>

#include "formats/base/file.h"

namespace sqz {

Status check_output(const std::string& path, bool force, const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    return {Code::kInvalidArgument, concat(path, ": is a folder; give the name of a file with -o")};
  }
  for (const std::string& input : inputs) {
    if (!fs::equivalent(path, input, error)) continue;
    return {Code::kInvalidArgument,
            concat(path, ": is an input and the output; give another name with -o")};
  }
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty() && !fs::is_directory(folder, error)) {
    return {Code::kInvalidArgument,
            concat(path, ": the folder ", folder.string(), " does not exist; create it first")};
  }
  // Creating the temporary file is the only check that a read-only file system cannot fool; it is
  // removed at once.
  return AtomicFile::create(Env::posix(), path, force).status();
}

}  // namespace sqz
