#include "tools/common/output_file.h"

#include <sys/stat.h>

#include <filesystem>
#include <set>

#include "formats/base/file.h"

namespace sqz {

namespace {

namespace fs = std::filesystem;

// What a file is, whichever of its names it was given; of one that is not there, its whole name.
std::string identity(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) == 0) return concat(info.st_dev, ":", info.st_ino);
  std::error_code error;
  const fs::path whole = fs::absolute(path, error);
  return fs::weakly_canonical(whole, error).string();
}

}  // namespace

Status check_not_inputs(const std::vector<std::string>& outputs,
                        const std::vector<std::string>& inputs) {
  std::set<std::string> read;
  for (const std::string& input : inputs) read.insert(identity(input));
  read.erase("");  // of options that were not given
  for (const std::string& output : outputs) {
    if (read.count(identity(output)) == 0) continue;
    return {Code::kInvalidArgument,
            concat(output, ": is an input and the output; give another name")};
  }
  return {};
}

Status check_output(const std::string& path, bool force, const std::vector<std::string>& inputs) {
  std::error_code error;
  if (fs::is_directory(path, error)) {
    return {Code::kInvalidArgument, concat(path, ": is a folder; give the name of a file with -o")};
  }
  SQZ_RETURN_IF_ERROR(check_not_inputs({path}, inputs));
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
  fs::create_directories(folder, error);
  if (error) return {Code::kIo, concat(label, ": create folder: ", error.message())};
  return {};
}

}  // namespace sqz
