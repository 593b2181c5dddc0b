#include "tools/sqz_index/status_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <ctime>

#include "tools/common/output_file.h"

namespace sqz {
namespace {

Status failed(const std::string& path, const char* call) {
  return {Code::kIo, concat(path, ": ", call, ": ", std::strerror(errno))};
}

}  // namespace

Result<std::unique_ptr<StatusFile>> StatusFile::open(const std::string& folder,
                                                     const Shard& shard) {
  SQZ_RETURN_IF_ERROR(make_folder(folder, folder));
  const std::string path = concat(folder, "/shard-", shard.index, "-of-", shard.count, ".jsonl");
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd < 0) return failed(path, "open");
  std::unique_ptr<StatusFile> out(new StatusFile(path, fd));
  const off_t size = ::lseek(fd, 0, SEEK_END);
  char last = '\n';
  if (size > 0 && ::pread(fd, &last, 1, size - 1) != 1) return failed(path, "read");
  if (last != '\n' && ::write(fd, "\n", 1) != 1) return failed(path, "write");
  return out;
}

StatusFile::~StatusFile() {
  ::close(fd_);
}

Status StatusFile::add(JsonMembers fields) {
  fields["time"] = static_cast<int64_t>(std::time(nullptr));
  const std::string line = JsonText(fields).str() + "\n";
  const ssize_t put = ::write(fd_, line.data(), line.size());
  if (put == static_cast<ssize_t>(line.size())) return {};
  if (put >= 0) errno = ENOSPC;
  return failed(path_, "write");
}

}  // namespace sqz
