// Status and Result<T>: how every function of the project reports failure. No exceptions cross a
// library boundary; dependencies that throw are caught where they are called.
//
// A message is one sentence that an operator can act on. For bad input it names the file, the
// field, what was found and what was expected: see bad_field().
#pragma once

#include <cstdint>
#include <initializer_list>
#include <new>
#include <optional>
#include <ostream>
#include <string>
#include <string_view>
#include <utility>

namespace sqz {

enum class Code : int32_t {
  kOk = 0,
  kInvalidArgument = 1,  // the caller's argument is out of range, null or inconsistent
  kNotFound = 2,         // a file or a tensor that should be there is not
  kIo = 3,               // the operating system refused: the message has the call and errno's text
  kCorrupt = 4,          // a file's bytes break its format or its checksum
  kUnsupported = 5,      // well-formed, but this build does not do it
  kMismatch = 6,         // two inputs that must belong together do not (model, tokenizer, index)
  kOutOfMemory = 7,
  kNumeric = 8,     // NaN or infinity where a finite number is required
  kExists = 9,      // an output that would be overwritten exists
  kCancelled = 10,  // the caller asked to stop
  kInternal = 11,   // a bug in sqz
};

// "ok", "invalid argument", ...: never null.
const char* code_name(Code code);

class [[nodiscard]] Status {
 public:
  Status() = default;  // success
  Status(Code code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}          // NOLINT: implicit
  Result(Status status) : status_(std::move(status)) {}  // NOLINT: implicit

  bool ok() const { return value_.has_value(); }
  Status status() const { return status_; }
  T& value() & { return value_.value(); }
  const T& value() const& { return value_.value(); }
  T&& value() && { return std::move(value_).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

// A value that becomes text as the stream operator prints it. Borrows the value.
struct Printed {
  template <class T>
  Printed(const T& part)  // NOLINT: implicit
      : value(&part),
        print([](std::ostream& out, const void* at) { out << *static_cast<const T*>(at); }) {}
  template <size_t N>
  Printed(const char (&part)[N]) : value(part), print(print_text) {}  // NOLINT: implicit

  static void print_text(std::ostream& out, const void* at);

  const void* value;
  void (*print)(std::ostream& out, const void* value);
};

std::string joined(std::initializer_list<Printed> parts);

// concat("a", 1, 'c'): the arguments in one string. One function prints them all, because a stream
// in each of the many calls took a sixth of the compilation.
template <class... Args>
std::string concat(const Args&... args) {
  return joined({args...});
}

// A string from a file as a message may print it: in double quotes, cut after 80 bytes, control and
// non-ASCII bytes as \xNN.
std::string in_quotes(std::string_view text);

// The project's one shape for a complaint about an input file:
// "FILE: FIELD: found FOUND, expected EXPECTED".
std::string bad_field(Printed file, Printed field, Printed found, Printed expected);

// Makes such complaints about one file: `return refuse("sink", sink, "a positive number")`.
struct Refuse {
  std::string_view file;  // borrowed
  Code code = Code::kCorrupt;

  Status operator()(Printed field, Printed found, Printed expected) const {
    return {code, bad_field(file, field, found, expected)};
  }
};

// Returns the result of `body`, or kOutOfMemory with these parts of a message if memory runs out.
template <class Body, class... Parts>
auto within_memory(const Body& body, const Parts&... parts) -> decltype(body()) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, concat(parts...));
  }
}

}  // namespace sqz

#define SQZ_CONCAT_INNER(a, b) a##b
#define SQZ_CONCAT(a, b) SQZ_CONCAT_INNER(a, b)

// Returns from the enclosing function if `expr` (a Status) failed.
#define SQZ_RETURN_IF_ERROR(expr)                                                  \
  do {                                                                             \
    if (::sqz::Status sqz_status_ = (expr); !sqz_status_.ok()) return sqz_status_; \
  } while (false)

// SQZ_ASSIGN_OR_RETURN(auto x, f()): x = the value of f(), or return its Status.
#define SQZ_ASSIGN_OR_RETURN(lhs, expr) \
  SQZ_ASSIGN_OR_RETURN_IMPL(SQZ_CONCAT(sqz_result_, __LINE__), lhs, expr)
#define SQZ_ASSIGN_OR_RETURN_IMPL(result, lhs, expr) \
  auto result = (expr);                              \
  if (!result.ok()) return result.status();          \
  lhs = std::move(result).value()
