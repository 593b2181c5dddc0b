// An Env that asks a hook before every call that changes or reads the disk, so that a test can fail
// the n-th call or tear the n-th write in two.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "formats/base/file.h"

namespace sqz::testing {

// `call`: "open", "read", "map", "check_room", "create", "write", "sync", "close", "link", "rename"
// or "sync_directory".
// A failure is returned in place of the call. remove() and exists() are not asked about: they are
// what cleaning up is made of.
using FaultHook = std::function<Status(const std::string& call)>;

class FaultEnv : public Env {
 public:
  // Without `unnamed`, like a file system without O_TMPFILE.
  explicit FaultEnv(FaultHook hook, bool unnamed = true, Env& base = Env::posix())
      : hook_(std::move(hook)), unnamed_(unnamed), base_(base) {}

  Result<std::unique_ptr<ReadFile>> open_read(const std::string& path) override {
    SQZ_RETURN_IF_ERROR(hook_("open"));
    SQZ_ASSIGN_OR_RETURN(auto file, base_.open_read(path));
    return std::unique_ptr<ReadFile>(new Reader(hook_, std::move(file)));
  }
  Result<std::unique_ptr<WriteFile>> create(const std::string& path, Temporary kind) override {
    if (kind == Temporary::kUnnamed && !unnamed_) return Status(Code::kUnsupported, path);
    SQZ_RETURN_IF_ERROR(hook_("create"));
    SQZ_ASSIGN_OR_RETURN(auto file, base_.create(path, kind));
    return std::unique_ptr<WriteFile>(new Writer(hook_, std::move(file)));
  }
  Status rename(const std::string& from, const std::string& to, bool replace) override {
    SQZ_RETURN_IF_ERROR(hook_("rename"));
    return base_.rename(from, to, replace);
  }
  Status remove(const std::string& path) override { return base_.remove(path); }
  Status sync_directory(const std::string& directory) override {
    SQZ_RETURN_IF_ERROR(hook_("sync_directory"));
    return base_.sync_directory(directory);
  }
  bool exists(const std::string& path) override { return base_.exists(path); }
  Status check_room(const std::string& path, uint64_t bytes) override {
    SQZ_RETURN_IF_ERROR(hook_("check_room"));
    return base_.check_room(path, bytes);
  }
  std::string follow(const std::string& path) override { return base_.follow(path); }

 private:
  class Reader : public ReadFile {
   public:
    Reader(const FaultHook& hook, std::unique_ptr<ReadFile> file)
        : hook_(hook), file_(std::move(file)) {}
    const std::string& path() const override { return file_->path(); }
    uint64_t size() const override { return file_->size(); }
    Status read(uint64_t offset, std::span<std::byte> out) const override {
      SQZ_RETURN_IF_ERROR(hook_("read"));
      return file_->read(offset, out);
    }
    Result<std::unique_ptr<Mapping>> map() const override {
      SQZ_RETURN_IF_ERROR(hook_("map"));
      return file_->map();
    }

   private:
    const FaultHook& hook_;
    std::unique_ptr<ReadFile> file_;
  };

  // A write is two halves with the hook between them: what fails or dies there leaves a torn file.
  class Writer : public WriteFile {
   public:
    Writer(const FaultHook& hook, std::unique_ptr<WriteFile> file)
        : hook_(hook), file_(std::move(file)) {}
    const std::string& path() const override { return file_->path(); }
    Status write(uint64_t offset, std::span<const std::byte> data) override {
      const size_t half = data.size() / 2;
      SQZ_RETURN_IF_ERROR(file_->write(offset, data.first(half)));
      SQZ_RETURN_IF_ERROR(hook_("write"));
      return file_->write(offset + half, data.subspan(half));
    }
    Status link(const std::string& to) override {
      SQZ_RETURN_IF_ERROR(hook_("link"));
      return file_->link(to);
    }
    Status copy_mode(const std::string& path) override { return file_->copy_mode(path); }
    Status sync() override {
      SQZ_RETURN_IF_ERROR(hook_("sync"));
      return file_->sync();
    }
    Status close() override {
      SQZ_RETURN_IF_ERROR(hook_("close"));
      return file_->close();
    }

   private:
    const FaultHook& hook_;
    std::unique_ptr<WriteFile> file_;
  };

  FaultHook hook_;
  bool unnamed_;
  Env& base_;
};

// The calls of AtomicFile that find the file whole under its name.
inline bool is_after_publishing(const std::string& call) {
  return call == "close" || call == "sync_directory";
}

// Notes every call; fails the one with index `fail_at` (0-based), none if it is negative.
struct FailNth {
  int fail_at = -1;
  Status failure = {Code::kIo, "disk: write: Input/output error"};
  std::vector<std::string> calls;

  FaultHook hook() {
    return [this](const std::string& call) {
      calls.push_back(call);
      return static_cast<int>(calls.size()) - 1 == fail_at ? failure : Status();
    };
  }
};

}  // namespace sqz::testing
