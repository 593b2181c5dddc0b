// Speed of a tokenizer on one core: tokenizer_bench TOKENIZER FILE...
// Prints, for each file, its size, the tokens, and the best of five runs of encode and decode.
#include <algorithm>
#include <chrono>
#include <cstdio>

#include "formats/tokenizer.h"

namespace {

constexpr int kRuns = 5;

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

sqz::Status measure(const sqz::Tokenizer& tokenizer, const char* path) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, sqz::read_text_file(sqz::Env::posix(), path));
  std::vector<int32_t> ids;
  double encode = 1e9;
  double decode = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    ids.clear();
    auto start = std::chrono::steady_clock::now();
    SQZ_RETURN_IF_ERROR(tokenizer.encode(text, false, ids));
    encode = std::min(encode, seconds_since(start));
    start = std::chrono::steady_clock::now();
    SQZ_ASSIGN_OR_RETURN(const std::string back, tokenizer.decode(ids));
    decode = std::min(decode, seconds_since(start));
    if (run == 0 && back != text) std::printf("%s: decodes to another text\n", path);
  }
  const double megabytes = static_cast<double>(text.size()) / 1e6;
  std::printf("%s: %.2f MB, %zu tokens, encode %.1f MB/s, decode %.1f MB/s\n", path, megabytes,
              ids.size(), megabytes / encode, megabytes / decode);
  return {};
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: tokenizer_bench TOKENIZER FILE...\n");
    return 2;
  }
  const auto tokenizer = sqz::Tokenizer::load(argv[1]);
  sqz::Status status = tokenizer.status();
  for (int i = 2; i < argc && status.ok(); ++i) status = measure(**tokenizer, argv[i]);
  if (!status.ok()) {
    std::fprintf(stderr, "tokenizer_bench: %s\n", status.message().c_str());
    return 1;
  }
  return 0;
}
