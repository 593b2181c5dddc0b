// MemorySanitizer with a C++ library that is not instrumented (preset msan): what libstdc++.so
// writes would seem uninitialised. It writes small strings and nodes, so that larger blocks alone
// count as uninitialised when they are allocated: the project's buffers are such blocks.
#include <sanitizer/allocator_interface.h>
#include <sanitizer/msan_interface.h>

#include <cstddef>

namespace {

constexpr size_t kSmall = 1024;

void allocated(const volatile void* memory, size_t size) {
  if (size >= kSmall) __msan_poison(memory, size);
}
void freed(const volatile void*) {}

[[maybe_unused]] const int installed = __sanitizer_install_malloc_and_free_hooks(allocated, freed);

}  // namespace

extern "C" __attribute__((visibility("default"))) const char* __msan_default_options() {
  return "poison_in_malloc=0:poison_in_free=0";
}
