// Every byte that the project reads from or writes to disk goes through Env, so that a test can
// fail any call (tests/formats/fault_env.h) and so that error messages are worded once.
//
// Publishing: a file that others may read is written by AtomicFile: to a temporary file in the same
// directory, synced, given the final name, and the directory synced. Under the final name there is
// the old file, the new file or none; never a part.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "formats/base/status.h"

namespace sqz {

// The status of a call that the operating system refused: "PATH: CALL: its words for `error`", an
// errno. kNotFound, kExists or kIo.
Status io_error(const std::string& path, const std::string& call, int error);

// A read-only mapping of a whole file. Unmapped on destruction. Reading a page that the file no
// longer has (truncated, or a failing disk) raises SIGBUS: see OpenMode in formats/sqz_file.h.
class Mapping {
 public:
  virtual ~Mapping() = default;
  std::span<const std::byte> bytes() const { return bytes_; }

 protected:
  std::span<const std::byte> bytes_;
};

// Reads at offsets; safe from several threads.
class ReadFile {
 public:
  virtual ~ReadFile() = default;
  virtual const std::string& path() const = 0;
  virtual uint64_t size() const = 0;  // at the time of opening
  // Fills `out` from `offset`. A file that ends before is kCorrupt ("file ends at ...").
  virtual Status read(uint64_t offset, std::span<std::byte> out) const = 0;
  // An empty file maps to an empty span.
  virtual Result<std::unique_ptr<Mapping>> map() const = 0;
};

// How a file comes to be that is not published yet.
enum class Temporary {
  kUnnamed,  // no name (O_TMPFILE): gone with the process, however it ends
  kNamed,    // a name that is free
};

// Writes at offsets. Not thread-safe. close() is called by the destructor if it was not before;
// only an explicit close() reports its error.
class WriteFile {
 public:
  virtual ~WriteFile() = default;
  virtual const std::string& path() const = 0;
  virtual Status write(uint64_t offset, std::span<const std::byte> data) = 0;
  // Gives a file without a name this one; kExists if it is taken.
  virtual Status link(const std::string&) { return {Code::kInternal, path() + ": has a name"}; }
  // Gives the file the permissions of `path`, if that is a file. A link is left alone. A folder,
  // pipe or device is refused, because this file is to take its place.
  virtual Status copy_mode(const std::string&) { return {}; }
  virtual Status sync() = 0;
  virtual Status close() = 0;
};

class Env {
 public:
  virtual ~Env() = default;
  static Env& posix();  // the operating system; a process-wide object

  virtual Result<std::unique_ptr<ReadFile>> open_read(const std::string& path) = 0;
  // kNamed: kExists if `path` is there. kUnnamed: in the folder of `path`; kUnsupported if the file
  // system has no such files.
  virtual Result<std::unique_ptr<WriteFile>> create(const std::string& path, Temporary kind) = 0;
  // Without `replace`, kExists if `to` is there: the same step that renames finds out.
  virtual Status rename(const std::string& from, const std::string& to, bool replace) = 0;
  virtual Status remove(const std::string& path) = 0;
  // A file system or a folder that cannot be synced is no error: there is nothing more to do.
  virtual Status sync_directory(const std::string& directory) = 0;
  virtual bool exists(const std::string& path) = 0;
  // kIo if the file system of `path`, which need not exist yet, has no room for `bytes` more.
  virtual Status check_room(const std::string&, uint64_t) { return {}; }
  // Where a symbolic link to a file leads, at last; any other path as it is. Only links of the
  // process's user and of the folder's owner are followed.
  virtual std::string follow(const std::string& path) { return path; }
};

// The whole of a small file (JSON, text). Larger than `limit` bytes is kUnsupported.
Result<std::string> read_text_file(Env& env, const std::string& path,
                                   uint64_t limit = uint64_t{1} << 32);

// One file on its way to being published. Destroyed without commit(), it removes its temporary. A
// process that SIGKILL ends leaves a temporary that has a name.
class AtomicFile {
 public:
  // Writes next to what PATH leads to if it is a symbolic link, with the permissions of the file
  // that it will replace. If PATH exists and `replace` is false: kExists, nothing created.
  //   kUnnamed  a file without a name; where the file system has none, kNamed
  //   kNamed    "PATH.tmp.<pid>.<n>", for a writer that opens it by its name
  static Result<AtomicFile> create(Env& env, std::string path, bool replace,
                                   Temporary kind = Temporary::kUnnamed);
  AtomicFile(AtomicFile&&) noexcept;
  AtomicFile& operator=(AtomicFile&&) = delete;
  ~AtomicFile();

  WriteFile& file() { return *file_; }
  const std::string& temporary_path() const { return temporary_; }  // empty if it has no name
  // sync, link or rename, close, sync the directory. After an error the final name is as it was
  // before (after an error of the last two steps it may already be the new, whole file).
  Status commit();

 private:
  AtomicFile(Env& env, std::string path, bool replace)
      : env_(&env), path_(std::move(path)), replace_(replace) {}
  Status open(Temporary kind);
  Status publish();

  Env* env_;
  std::string path_, temporary_;
  bool replace_;
  std::unique_ptr<WriteFile> file_;
};

}  // namespace sqz
