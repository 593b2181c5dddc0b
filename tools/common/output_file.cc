#include "tools/common/output_file.h"

#include <filesystem>

#include "formats/base/file.h"

namespace sqz {

Status check_not_input(const std::string& path, const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(path, error);  // empty after an error
  for (const std::string& input : inputs) {
    const bool same = !whole.empty() && whole == fs::weakly_canonical(input, error);
    if (!same && !fs::equivalent(path, input, error)) continue;
    return {Code::kInvalidArgument,
            concat(path, ": is an input and the output; give another name")};
  }
  return {};
}

Status check_output(const std::string& path, bool force, const std::vector<std::string>& inputs) {
  namespace fs = std::filesystem;
  std::error_code error;
  if (fs::is_directory(path, error)) {
    return {Code::kInvalidArgument, concat(path, ": is a folder; give the name of a file with -o")};
  }
  SQZ_RETURN_IF_ERROR(check_not_input(path, inputs));
  const fs::path folder = fs::path(path).parent_path();
  if (!folder.empty() && !fs::is_directory(folder, error)) {
    return {Code::kInvalidArgument,
            concat(path, ": the folder ", folder.string(), " does not exist; create it first")};
  }
  // Creating the temporary file is the only check that a read-only file system cannot fool; it is
  // removed at once.
  return AtomicFile::create(Env::posix(), path, force).status();
}

Status make_folder(const std::string& folder, const std::string& label) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return {Code::kIo, concat(label, ": create folder: ", error.message())};
  return {};
}

}  // namespace sqz
