// main() of the fuzz targets where there is no fuzzing engine: runs each file of the folders and
// each file that it is given. Options of libFuzzer are ignored.
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// libFuzzer's function; nothing is mutated here.
extern "C" size_t LLVMFuzzerMutate(uint8_t*, size_t size, size_t) {
  return size;
}

int main(int argc, char** argv) {
  std::vector<std::filesystem::path> files;
  for (const std::string& argument : std::vector<std::string>(argv + 1, argv + argc)) {
    if (argument.starts_with('-')) continue;
    if (!std::filesystem::is_directory(argument)) {
      files.emplace_back(argument);
      continue;
    }
    for (const auto& entry : std::filesystem::directory_iterator(argument)) {
      files.push_back(entry.path());
    }
  }
  for (const auto& path : files) {
    std::ifstream file(path, std::ios::binary);
    const std::string bytes(std::istreambuf_iterator<char>(file), {});
    if (!file) return std::fprintf(stderr, "%s: cannot be read\n", path.c_str()), 1;
    std::vector<uint8_t> exact(bytes.begin(), bytes.end());  // so that its end is watched
    LLVMFuzzerTestOneInput(exact.data(), exact.size());
  }
  std::printf("%zu inputs\n", files.size());
  return files.empty() ? 1 : 0;
}
