// MemorySanitizer with a C++ library that is not instrumented (preset msan): what libstdc++.so
// writes would seem uninitialised. So memory counts as uninitialised only if it was asked for as an
// array, `new T[n]`: the project's buffers are, which it fills itself. Other memory is not watched.
#include <sanitizer/msan_interface.h>

#include <cstdlib>
#include <new>

#define SQZ_REPLACED __attribute__((visibility("default")))  // so that libsqz.so uses them, too

extern "C" SQZ_REPLACED const char* __msan_default_options() {
  return "poison_in_malloc=0";
}
SQZ_REPLACED void* operator new[](size_t size) {
  void* memory = std::malloc(size);
  if (memory == nullptr) throw std::bad_alloc();
  __msan_allocated_memory(memory, size);
  return memory;
}
SQZ_REPLACED void operator delete[](void* memory) noexcept {
  std::free(memory);
}
SQZ_REPLACED void operator delete[](void* memory, size_t) noexcept {
  std::free(memory);
}
