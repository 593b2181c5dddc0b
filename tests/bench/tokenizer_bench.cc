// Speed of a tokenizer on one core: tokenizer_bench TOKENIZER FILE...
// Prints, for each file, its size, the tokens, and the best of five runs of encode and decode in
// processor time.
#include <algorithm>
#include <cstdio>
#include <ctime>

#include "formats/tokenizer.h"

namespace {

constexpr int kRuns = 5;

// Processor time of this thread: what other programs do at the same time does not count.
double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

sqz::Status measure(const sqz::Tokenizer& tokenizer, const char* path) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, sqz::read_text_file(sqz::Env::posix(), path));
  std::vector<int32_t> ids;
  double encode = 1e9;
  double decode = 1e9;
  for (int run = 0; run < kRuns; ++run) {
    ids.clear();
    double start = cpu_seconds();
    SQZ_RETURN_IF_ERROR(tokenizer.encode(text, false, ids));
    encode = std::min(encode, cpu_seconds() - start);
    start = cpu_seconds();
    SQZ_ASSIGN_OR_RETURN(const std::string back, tokenizer.decode(ids));
    decode = std::min(decode, cpu_seconds() - start);
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
