#include "formats/base/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>

namespace sqz {
namespace {

Status io_error(const std::string& path, const char* call, int error) {
  const Code code = error == ENOENT ? Code::kNotFound : error == EEXIST ? Code::kExists : Code::kIo;
  std::string hint;
  if (error == ENOSPC || error == EDQUOT)
    hint = "; free some space on that file system and try again";
  return {code, concat(path, ": ", call, ": ", std::strerror(error), hint)};
}

std::string directory_of(const std::string& path) {
  const size_t slash = path.rfind('/');
  if (slash == std::string::npos) return ".";
  return slash == 0 ? "/" : path.substr(0, slash);
}

class PosixMapping : public Mapping {
 public:
  explicit PosixMapping(std::span<const std::byte> bytes) { bytes_ = bytes; }
  ~PosixMapping() override {
    if (!bytes_.empty()) ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size());
  }
};

class PosixReadFile : public ReadFile {
 public:
  PosixReadFile(std::string path, int fd, uint64_t size)
      : path_(std::move(path)), fd_(fd), size_(size) {}
  ~PosixReadFile() override { ::close(fd_); }

  const std::string& path() const override { return path_; }
  uint64_t size() const override { return size_; }

  Status read(uint64_t offset, std::span<std::byte> out) const override {
    while (!out.empty()) {
      const ssize_t got = ::pread(fd_, out.data(), out.size(), static_cast<off_t>(offset));
      if (got < 0) {
        if (errno == EINTR) continue;
        return io_error(path_, "read", errno);
      }
      if (got == 0) {
        return Refuse{path_}("file length", concat("end at byte ", offset),
                             concat(out.size(), " more bytes"));
      }
      offset += static_cast<uint64_t>(got);
      out = out.subspan(static_cast<size_t>(got));
    }
    return {};
  }

  Result<std::unique_ptr<Mapping>> map() const override {
    if (size_ == 0) return std::unique_ptr<Mapping>(new PosixMapping({}));
    void* data = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd_, 0);
    if (data == MAP_FAILED) return io_error(path_, "mmap", errno);
    return std::unique_ptr<Mapping>(
        new PosixMapping({static_cast<const std::byte*>(data), static_cast<size_t>(size_)}));
  }

 private:
  std::string path_;
  int fd_;
  uint64_t size_;
};

class PosixWriteFile : public WriteFile {
 public:
  PosixWriteFile(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  ~PosixWriteFile() override {
    if (fd_ >= 0) ::close(fd_);
  }

  const std::string& path() const override { return path_; }

  Status write(uint64_t offset, std::span<const std::byte> data) override {
    while (!data.empty()) {
      const ssize_t put = ::pwrite(fd_, data.data(), data.size(), static_cast<off_t>(offset));
      if (put < 0) {
        if (errno == EINTR) continue;
        return io_error(path_, "write", errno);
      }
      offset += static_cast<uint64_t>(put);
      data = data.subspan(static_cast<size_t>(put));
    }
    return {};
  }

  Status copy_mode(const std::string& path) override {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return {};
    return ::fchmod(fd_, info.st_mode & 07777) == 0 ? Status() : io_error(path_, "fchmod", errno);
  }

  Status sync() override { return ::fsync(fd_) == 0 ? Status() : io_error(path_, "fsync", errno); }

  Status close() override {
    const int fd = std::exchange(fd_, -1);
    return fd < 0 || ::close(fd) == 0 ? Status() : io_error(path_, "close", errno);
  }

 private:
  std::string path_;
  int fd_;
};

class PosixEnv : public Env {
 public:
  Result<std::unique_ptr<ReadFile>> open_read(const std::string& path) override {
    // A pipe would wait for a writer.
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0) return io_error(path, "open", errno);
    struct stat info {};
    if (::fstat(fd, &info) != 0) {
      const int error = errno;
      ::close(fd);
      return io_error(path, "fstat", error);
    }
    if (!S_ISREG(info.st_mode)) {
      ::close(fd);
      return Status(Code::kInvalidArgument, concat(path, ": not a regular file"));
    }
    return std::unique_ptr<ReadFile>(
        new PosixReadFile(path, fd, static_cast<uint64_t>(info.st_size)));
  }

  Result<std::unique_ptr<WriteFile>> create(const std::string& path) override {
    const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) return io_error(path, "create", errno);
    (void)::flock(fd, LOCK_EX | LOCK_NB);  // where the file system has no locks, none
    return std::unique_ptr<WriteFile>(new PosixWriteFile(path, fd));
  }

  Status rename(const std::string& from, const std::string& to, bool replace) override {
    const unsigned flags = replace ? 0 : RENAME_NOREPLACE;
    if (::renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), flags) == 0) return {};
    if (replace || (errno != EINVAL && errno != ENOSYS)) return io_error(to, "rename", errno);
    // Not every file system can. A second name refuses to replace, too.
    if (::link(from.c_str(), to.c_str()) != 0) return io_error(to, "link", errno);
    return remove(from);
  }

  Status remove(const std::string& path) override {
    return ::unlink(path.c_str()) == 0 ? Status() : io_error(path, "unlink", errno);
  }

  Status sync_directory(const std::string& directory) override {
    const int fd = ::open(directory.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return errno == EACCES ? Status() : io_error(directory, "open", errno);
    const int result = ::fsync(fd);
    const int error = errno;
    ::close(fd);
    if (result == 0 || error == EINVAL || error == EROFS || error == ENOTSUP) return {};
    return io_error(directory, "fsync", error);
  }

  bool exists(const std::string& path) override {
    struct stat info {};
    return ::lstat(path.c_str(), &info) == 0;
  }

  Status check_room(const std::string& path, uint64_t bytes) override {
    struct statvfs info {};
    if (::statvfs(directory_of(path).c_str(), &info) != 0) return {};  // creating it says why
    const uint64_t free = uint64_t{info.f_bavail} * info.f_frsize;
    if (bytes <= free) return {};
    return {Code::kIo, concat(path, ": needs ", bytes, " bytes, and its file system has ", free,
                              " free; free some space or write elsewhere")};
  }

  std::string follow(const std::string& path) override {
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0 || !S_ISLNK(info.st_mode)) return path;
    const std::unique_ptr<char, decltype(&std::free)> end(::realpath(path.c_str(), nullptr),
                                                          &std::free);
    return end == nullptr ? path : end.get();
  }
};

constexpr char kTemporary[] = ".tmp.";
constexpr int kMostLeftovers = 1000;  // of one output and process number

// "NAME.tmp.<digits>.<digits>".
bool is_temporary(std::string_view name) {
  const size_t at = name.rfind(kTemporary);
  if (at == std::string_view::npos || at == 0) return false;
  const std::string_view numbers = name.substr(at + sizeof(kTemporary) - 1);
  const size_t dot = numbers.find('.');
  const auto is_number = [](std::string_view text) {
    return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos;
  };
  return dot != std::string_view::npos && is_number(numbers.substr(0, dot)) &&
         is_number(numbers.substr(dot + 1));
}

Status exists_error(const std::string& path) {
  return {Code::kExists, concat(path, ": file exists; pass --force to replace it")};
}

}  // namespace

Env& Env::posix() {
  static PosixEnv env;
  return env;
}

Result<std::string> read_text_file(Env& env, const std::string& path, uint64_t limit) {
  SQZ_ASSIGN_OR_RETURN(const auto file, env.open_read(path));
  if (file->size() > limit) {
    return Refuse{path, Code::kUnsupported}("file size", concat(file->size(), " bytes"),
                                            concat("at most ", limit));
  }
  std::string text(static_cast<size_t>(file->size()), '\0');
  SQZ_RETURN_IF_ERROR(file->read(0, std::as_writable_bytes(std::span(text))));
  return text;
}

Result<AtomicFile> AtomicFile::create(Env& env, std::string path, bool replace) {
  if (!replace && env.exists(path)) return exists_error(path);
  path = env.follow(path);
  static std::atomic<uint64_t> counter{0};
  // A process of this number, in a container or long ago, may have left such a name.
  for (int left = kMostLeftovers;; --left) {
    std::string temporary = concat(path, kTemporary, ::getpid(), ".", counter.fetch_add(1));
    auto file = env.create(temporary);
    if (!file.ok() && file.status().code() == Code::kExists && left > 0) continue;
    if (!file.ok()) return file.status();
    AtomicFile out(env, std::move(path), std::move(temporary), replace, std::move(*file));
    SQZ_RETURN_IF_ERROR(out.file_->copy_mode(out.path_));
    return out;
  }
}

AtomicFile::AtomicFile(Env& env, std::string path, std::string temporary, bool replace,
                       std::unique_ptr<WriteFile> file)
    : env_(&env),
      path_(std::move(path)),
      temporary_(std::move(temporary)),
      replace_(replace),
      file_(std::move(file)) {}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : env_(other.env_),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      replace_(other.replace_),
      file_(std::move(other.file_)) {}

AtomicFile::~AtomicFile() {
  file_.reset();
  if (!temporary_.empty()) (void)env_->remove(temporary_);
}

Status AtomicFile::commit() {
  SQZ_RETURN_IF_ERROR(file_->sync());
  SQZ_RETURN_IF_ERROR(file_->close());
  // A file that appeared while we wrote is as precious as one that was there when we started.
  const Status renamed = env_->rename(temporary_, path_, replace_);
  if (renamed.code() == Code::kExists) return exists_error(path_);
  SQZ_RETURN_IF_ERROR(renamed);
  temporary_.clear();
  return env_->sync_directory(directory_of(path_));
}

Result<std::vector<std::string>> find_leftovers(const std::string& directory) {
  DIR* const entries = ::opendir(directory.c_str());
  if (entries == nullptr) return io_error(directory, "opendir", errno);
  std::vector<std::string> found;
  while (const dirent* entry = ::readdir(entries)) {
    if (!is_temporary(entry->d_name)) continue;
    std::string path = concat(directory, "/", entry->d_name);
    const int fd = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOFOLLOW);
    if (fd < 0) continue;
    if (::flock(fd, LOCK_EX | LOCK_NB) == 0) found.push_back(std::move(path));
    ::close(fd);
  }
  ::closedir(entries);
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace sqz
