// Uses the installed C++ face: opens the file named on the command line and prints its size.
#include <cstdio>
#include <sqz/sqz.hpp>

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  sqz_index* index = nullptr;
  if (sqz_index_open(argv[1], SQZ_OPEN_READ, &index) != SQZ_OK) {
    std::fprintf(stderr, "%s\n", sqz_last_error());
    return 1;
  }
  sqz_index_info info{};
  info.struct_size = sizeof(info);
  const sqz_status status = sqz_index_describe(index, &info);
  std::printf("%lld tokens\n", static_cast<long long>(info.tokens));
  sqz_index_close(index);
  return status == SQZ_OK ? 0 : 1;
}
