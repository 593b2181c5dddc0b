#include "formats/base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "formats/base/temporaries.h"

namespace sqz {
namespace {

// Kernels and file systems without O_TMPFILE have several ways to say so.
Status create_error(const std::string& path, Temporary kind, int error) {
  const bool unsupported =
      error == EOPNOTSUPP || error == EISDIR || error == EINVAL || error == ENOENT;
  if (kind != Temporary::kUnnamed || !unsupported) return io_error(path, "create", error);
  return {Code::kUnsupported, path + ": no files without a name here"};
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

// Where the kernel shows an open file; linking from there names a file that has no name.
std::string proc_path(int fd) {
  return concat("/proc/self/fd/", fd);
}

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
      if (put < 0 && errno == EINTR) continue;
      if (put <= 0) return io_error(path_, "write", put < 0 ? errno : EIO);
      offset += static_cast<uint64_t>(put);
      data = data.subspan(static_cast<size_t>(put));
    }
    return {};
  }

  Status link(const std::string& to) override {
    if (::linkat(AT_FDCWD, proc_path(fd_).c_str(), AT_FDCWD, to.c_str(), AT_SYMLINK_FOLLOW) == 0)
      return {};
    return io_error(to, "link", errno);
  }

  Status copy_mode(const std::string& path) override {
    struct stat info {};
    if (::lstat(path.c_str(), &info) != 0 || S_ISLNK(info.st_mode)) return {};
    if (!S_ISREG(info.st_mode)) {
      return {Code::kInvalidArgument,
              concat(path, ": found a folder, pipe or device, expected a file or nothing")};
    }
    return ::fchmod(fd_, info.st_mode & 0777) == 0 ? Status() : io_error(path_, "fchmod", errno);
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

  Result<std::unique_ptr<WriteFile>> create(const std::string& path, Temporary kind) override {
    const bool unnamed = kind == Temporary::kUnnamed;
    const int fd = unnamed
                       ? ::open(directory_of(path).c_str(), O_WRONLY | O_TMPFILE | O_CLOEXEC, 0666)
                       : ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0) return create_error(path, kind, errno);
    auto file = std::make_unique<PosixWriteFile>(path, fd);
    // link() needs /proc.
    if (unnamed && ::access(proc_path(fd).c_str(), F_OK) != 0)
      return create_error(path, kind, EOPNOTSUPP);
    return std::unique_ptr<WriteFile>(std::move(file));
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
    struct stat info {
    }, folder{};
    if (::lstat(path.c_str(), &info) != 0 || !S_ISLNK(info.st_mode)) return path;
    const bool trusted =
        info.st_uid == ::geteuid() ||
        (::stat(directory_of(path).c_str(), &folder) == 0 && info.st_uid == folder.st_uid);
    if (!trusted) return path;
    const std::unique_ptr<char, decltype(&std::free)> end(::realpath(path.c_str(), nullptr),
                                                          &std::free);
    return end == nullptr ? path : end.get();
  }
};

constexpr char kTemporary[] = ".tmp.";
constexpr int kMostLeftovers = 1000;  // of one output and process number

// Calls take(name) with names for a temporary of `path` until one is free, and returns that. A
// process of this number, in a container or long ago, may have left such a name.
template <class Take>
Status take_free_name(const std::string& path, std::string& name, Take take) {
  static std::atomic<uint64_t> counter{0};
  for (int left = kMostLeftovers;; --left) {
    std::string next = concat(path, kTemporary, ::getpid(), ".", counter.fetch_add(1));
    const Status status = take(next);
    if (status.code() == Code::kExists && left > 0) continue;
    if (status.ok()) {
      remember_temporary(next);
      name = std::move(next);
    }
    return status;
  }
}

Status exists_error(const std::string& path) {
  return {
      Code::kExists,
      concat(path, ": file exists; remove it, or replace it with --force (in the API, replace)")};
}

}  // namespace

Status io_error(const std::string& path, const std::string& call, int error) {
  const Code code = error == ENOENT ? Code::kNotFound : error == EEXIST ? Code::kExists : Code::kIo;
  std::string hint;
  if (error == ENOSPC || error == EDQUOT)
    hint = "; free some space on that file system and try again";
  return {code, concat(path, ": ", call, ": ", std::strerror(error), hint)};
}

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

Result<AtomicFile> AtomicFile::create(Env& env, std::string path, bool replace, Temporary kind) {
  if (!replace && env.exists(path)) return exists_error(path);
  AtomicFile out(env, env.follow(path), replace);
  SQZ_RETURN_IF_ERROR(out.open(kind));
  SQZ_RETURN_IF_ERROR(out.file_->copy_mode(out.path_));
  return out;
}

Status AtomicFile::open(Temporary kind) {
  const auto take = [&](const std::string& name) {
    auto file = env_->create(name, kind);
    if (file.ok()) file_ = std::move(*file);
    return file.status();
  };
  if (kind == Temporary::kUnnamed) {
    const Status status = take(path_);
    if (status.code() != Code::kUnsupported) return status;
    kind = Temporary::kNamed;
  }
  return take_free_name(path_, temporary_, take);
}

AtomicFile::AtomicFile(AtomicFile&& other) noexcept
    : env_(other.env_),
      path_(std::move(other.path_)),
      temporary_(std::exchange(other.temporary_, {})),
      replace_(other.replace_),
      file_(std::move(other.file_)) {}

AtomicFile::~AtomicFile() {
  if (temporary_.empty()) return;
  (void)env_->remove(temporary_);
  forget_temporary(temporary_);
}

Status AtomicFile::commit() {
  SQZ_RETURN_IF_ERROR(file_->sync());
  // A file that appeared while we wrote is as precious as one that was there when we started.
  const Status published = publish();
  if (published.code() == Code::kExists) return exists_error(path_);
  SQZ_RETURN_IF_ERROR(published);
  forget_temporary(temporary_);
  temporary_.clear();
  SQZ_RETURN_IF_ERROR(file_->close());
  return env_->sync_directory(directory_of(path_));
}

Status AtomicFile::publish() {
  if (temporary_.empty()) {
    const Status linked = file_->link(path_);
    if (linked.code() != Code::kExists || !replace_) return linked;
    SQZ_RETURN_IF_ERROR(take_free_name(path_, temporary_,
                                       [&](const std::string& name) { return file_->link(name); }));
  }
  return env_->rename(temporary_, path_, replace_);
}

}  // namespace sqz
