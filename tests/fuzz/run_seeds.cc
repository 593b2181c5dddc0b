// main() of the fuzz targets where there is no fuzzing engine: runs each file that it is given.
// Options of libFuzzer are ignored.
#include <cstdint>
#include <cstdio>
#include <vector>

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

// libFuzzer's function; nothing is mutated here.
extern "C" size_t LLVMFuzzerMutate(uint8_t*, size_t size, size_t) {
  return size;
}

int main(int argc, char** argv) {
  int inputs = 0;
  for (int i = 1; i < argc; ++i) {
    if (argv[i][0] == '-') continue;
    std::FILE* file = std::fopen(argv[i], "rb");
    if (file == nullptr) return std::fprintf(stderr, "%s: cannot be read\n", argv[i]), 1;
    std::vector<uint8_t> bytes;
    for (int byte; (byte = std::fgetc(file)) != EOF;) bytes.push_back(static_cast<uint8_t>(byte));
    std::fclose(file);
    bytes.shrink_to_fit();  // so that its end is watched
    LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
    ++inputs;
  }
  std::printf("%d inputs\n", inputs);
  return inputs > 0 ? 0 : 1;
}
