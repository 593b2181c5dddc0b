// The border between the C ABI and C++. No exception crosses it; every failure leaves a code and a
// sentence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <utility>

#include "formats/base/status.h"
#include "sqz/sqz.h"

namespace sqz::capi {

inline constexpr int32_t kCpu = 1, kCuda = 2;  // DLDeviceType

inline Status invalid(std::string message) {
  return {Code::kInvalidArgument, std::move(message)};
}

// Remembers the message for sqz_last_error() on this thread and returns the code. Never allocates.
sqz_status fail(Code code, const char* message) noexcept;

// The number in an enum argument. A C caller can pass any number, and in C++ loading a number that
// the enum does not have is undefined.
template <class E>
int enum_number(const E& value) {
  static_assert(sizeof(E) == sizeof(int));
  int number = 0;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

// No version of this library has larger structs. A greater size was never initialised.
inline constexpr uint32_t kLargestStruct = 4096;

// Checks that a caller's struct is there and has a plausible size.
template <class T>
Status check_struct_size(const T* in, const char* name) {
  if (in == nullptr) return {Code::kInvalidArgument, concat(name, ": found null")};
  if (in->struct_size < sizeof(uint64_t) || in->struct_size > kLargestStruct) {
    return {Code::kInvalidArgument, concat(name, ".struct_size: found ", in->struct_size,
                                           ", expected sizeof(the struct), ", sizeof(T))};
  }
  return {};
}

// Copies a struct that the caller filled. The struct of an older caller is shorter; the fields that
// it lacks become zero. The struct of a newer caller is longer; its unknown part must be zero.
template <class T>
Status read_struct(const T* in, const char* name, T& out) {
  SQZ_RETURN_IF_ERROR(check_struct_size(in, name));
  const size_t size = in->struct_size;
  std::memset(&out, 0, sizeof(T));
  std::memcpy(&out, in, std::min(size, sizeof(T)));
  const auto* bytes = reinterpret_cast<const unsigned char*>(in);
  for (size_t i = sizeof(T); i < size; ++i) {
    if (bytes[i] == 0) continue;
    return {Code::kUnsupported, concat(name, ": found a value at byte ", i, ", expected at most ",
                                       sizeof(T), " bytes: it needs a newer libsqz")};
  }
  return {};
}

// Copies a result to a struct of the size that the caller gave. Fields that this library does not
// know become zero.
template <class T>
Status write_struct(const T& result, const char* name, T* out) {
  SQZ_RETURN_IF_ERROR(check_struct_size(out, name));
  const uint32_t size = out->struct_size;
  std::memset(out, 0, size);
  std::memcpy(out, &result, size < sizeof(T) ? size : sizeof(T));
  out->struct_size = size;
  return {};
}

// Runs the body of a function of the ABI.
template <class Body>
sqz_status fence(const Body& body) noexcept {
  try {
    const Status status = body();
    return status.ok() ? SQZ_OK : fail(status.code(), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return fail(Code::kOutOfMemory, "out of memory");
  } catch (const std::system_error& error) {  // a thread that cannot be started
    return fail(Code::kIo, error.what());
  } catch (const std::exception& error) {
    return fail(Code::kInternal, error.what());
  } catch (...) {
    return fail(Code::kInternal, "unknown exception");
  }
}

}  // namespace sqz::capi
