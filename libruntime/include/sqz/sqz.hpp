// sqz.hpp - sqz.h for C++17: handles that close themselves, failures as exceptions.
//
// Header only: the exceptions are thrown in your own code, never across the library's boundary.
// Everything else (ownership of tensors, threads, versions) is as sqz.h says.
//
//   sqz::runtime::Index index("book.sqz");
//   sqz::runtime::Session session(index, sqz::runtime::options_for_budget(0.125));
//   session.attend(args);
#ifndef SQZ_SQZ_HPP_
#define SQZ_SQZ_HPP_

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "sqz/sqz.h"

namespace sqz::runtime {

// what() is sqz_last_error() at the time of the failure.
class Error : public std::runtime_error {
 public:
  explicit Error(sqz_status status) : std::runtime_error(sqz_last_error()), status_(status) {}
  sqz_status status() const noexcept { return status_; }

 private:
  sqz_status status_;
};

inline void check(sqz_status status) {
  if (status != SQZ_OK) throw Error(status);
}

// A zeroed struct of the ABI with struct_size set: the defaults.
template <class T>
T make() {
  T value{};
  value.struct_size = static_cast<uint32_t>(sizeof(T));
  return value;
}

inline sqz_session_options options_for_budget(double budget) {
  auto options = make<sqz_session_options>();
  options.budget = budget;
  return options;
}

inline sqz_session_options dense_options() {
  auto options = make<sqz_session_options>();
  options.selector = SQZ_SELECTOR_DENSE;
  return options;
}

// An open index. Sessions keep what they need of it; it may be destroyed before them.
class Index {
 public:
  // SQZ_OPEN_VERIFY: an Error unless every checksum in the file is right.
  explicit Index(const std::string& path, sqz_open_mode mode = SQZ_OPEN_MMAP) {
    sqz_index* handle = nullptr;
    check(sqz_index_open(path.c_str(), mode, &handle));
    handle_.reset(handle);
  }

  // Its strings live as long as the Index.
  sqz_index_info describe() const {
    auto info = make<sqz_index_info>();
    check(sqz_index_describe(handle_.get(), &info));
    return info;
  }
  void verify() const { check(sqz_index_verify(handle_.get())); }
  // To a GPU, for sessions with device_type 2.
  void upload(int32_t device_id = 0) {
    auto options = make<sqz_upload_options>();
    options.device_id = device_id;
    check(sqz_index_upload(handle_.get(), &options));
  }
  void unload(int32_t device_id = 0) { check(sqz_index_unload(handle_.get(), device_id)); }
  sqz_index* handle() const noexcept { return handle_.get(); }

 private:
  std::unique_ptr<sqz_index, void (*)(sqz_index*)> handle_{nullptr, sqz_index_close};
};

class Session {
 public:
  Session(const Index& index, const sqz_session_options& options) {
    sqz_session* handle = nullptr;
    check(sqz_session_create(index.handle(), &options, &handle));
    handle_.reset(handle);
  }

  // Into a slot; the index may be destroyed before the session.
  void put(int64_t slot, const Index& index) {
    check(sqz_session_put(handle_.get(), slot, index.handle()));
  }
  void empty(int64_t slot) { check(sqz_session_put(handle_.get(), slot, nullptr)); }

  void attend(const sqz_attend_args& args) { check(sqz_attend(handle_.get(), &args)); }

  // Runs of the first block, per KV head: see sqz_select().
  std::vector<std::vector<sqz_run>> select(const sqz_attend_args& args, int64_t kv_heads) {
    std::vector<int64_t> indptr(static_cast<size_t>(kv_heads) + 1);
    std::vector<sqz_run> runs;
    int64_t count = 0;
    sqz_status status = sqz_select(handle_.get(), &args, nullptr, 0, indptr.data(), &count);
    if (status == SQZ_INVALID_ARGUMENT && count > 0) {
      runs.resize(static_cast<size_t>(count));
      status = sqz_select(handle_.get(), &args, runs.data(), count, indptr.data(), &count);
    }
    check(status);
    std::vector<std::vector<sqz_run>> heads;
    for (size_t h = 0; h + 1 < indptr.size(); ++h) {
      heads.emplace_back(runs.begin() + indptr[h], runs.begin() + indptr[h + 1]);
    }
    return heads;
  }

  // Totals of one layer, or of all with -1, of the index in a slot.
  sqz_stats stats(int64_t layer = -1, int64_t slot = 0) const {
    auto stats = make<sqz_stats>();
    check(sqz_session_stats(handle_.get(), slot, layer, &stats));
    return stats;
  }
  void reset_stats() { check(sqz_session_reset_stats(handle_.get())); }
  sqz_session* handle() const noexcept { return handle_.get(); }

 private:
  std::unique_ptr<sqz_session, void (*)(sqz_session*)> handle_{nullptr, sqz_session_destroy};
};

// A contiguous CPU tensor over your memory. `shape` is borrowed: it must outlive the tensor.
inline sqz_tensor f32_tensor(float* data, int64_t* shape, int32_t ndim) {
  sqz_tensor tensor{};
  tensor.data = data;
  tensor.device_type = 1;
  tensor.ndim = ndim;
  tensor.dtype_code = 2;
  tensor.dtype_bits = 32;
  tensor.dtype_lanes = 1;
  tensor.shape = shape;
  return tensor;
}

}  // namespace sqz::runtime

#endif  // SQZ_SQZ_HPP_
