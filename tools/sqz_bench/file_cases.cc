// `bandwidth`, `open` and `verify`.
#include "formats/sqz_file.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/made_index.h"
#include "tools/sqz_bench/memory_reads.h"

namespace sqz::bench {

Result<CaseSetup> bandwidth_case(const Options& options) {
  const int64_t tokens = options.tokens_or(131072);
  const auto bytes = static_cast<size_t>(tokens * 4 * options.kv_heads * options.head_dim);
  // Written, so that the pages are there and differ from the one page of zeros.
  const auto memory = std::make_shared<std::vector<std::byte>>(bytes, std::byte{1});
  CaseSetup setup;
  setup.shape = {{"bytes", bytes}};
  setup.rounds = options.repeat_or(25);
  std::vector<int> counts = {1};
  for (int threads = 2; threads < options.threads; threads *= 2) counts.push_back(threads);
  if (options.threads > 1) counts.push_back(options.threads);
  for (const int threads : counts) {
    setup.contenders.push_back(
        reading(concat("read, ", threads, threads > 1 ? " threads" : " thread"), threads,
                {std::span(*memory)}, memory));
  }
  setup.baselines = {setup.contenders.front().name};
  return setup;
}

Result<CaseSetup> open_case(const Options& options) {
  CaseSetup setup;
  const double gib = options.file_gib_or(100), bytes = gib * 0x1p30;
  const int64_t layers = options.file_layers;
  setup.shape = {{"layers", layers}, {"file_gib", gib}};
  setup.rounds = options.repeat_or(100);
  const struct {
    std::string name;
    double bytes;
    int64_t layers;
  } files[] = {{concat(gib, " GiB"), bytes, layers},
               {"1/100 of it", bytes / 100, layers},
               {"one layer of it", bytes / static_cast<double>(layers), 1}};
  for (const auto& file : files) {
    SQZ_ASSIGN_OR_RETURN(const SparseIndex made,
                         make_sparse_index(options, file.bytes, file.layers));
    setup.contenders.push_back(
        {.name = file.name,
         .run = [made](int64_t) { return SqzFile::open(made.file->path()).status(); },
         .details =
             [made] {
               return JsonMembers{{"file_bytes", made.bytes}};
             }});
  }
  setup.baselines = {setup.contenders.front().name};
  return setup;
}

Result<CaseSetup> verify_case(const Options& options) {
  SQZ_ASSIGN_OR_RETURN(const auto index, make_index(options, options.tokens_or(131072)));
  SQZ_ASSIGN_OR_RETURN(const auto file, SqzFile::open(index->path()));
  SQZ_ASSIGN_OR_RETURN(const auto opened, Env::posix().open_read(index->path()));
  SQZ_ASSIGN_OR_RETURN(const std::shared_ptr<const Mapping> mapping, opened->map());
  CaseSetup setup;
  setup.shape = {{"file_bytes", file->file_bytes()}};
  setup.rounds = options.repeat_or(9);
  setup.baselines = {"read"};
  setup.contenders.push_back(reading("read", options.threads, {mapping->bytes()}, mapping));
  const auto verify = [index, file, threads = options.threads](int64_t) -> Status {
    SQZ_ASSIGN_OR_RETURN(const auto report, file->verify({}, threads));
    if (report.problems.empty()) return {};
    return {Code::kInternal, report.problems.front()};
  };
  setup.contenders.push_back(
      {.name = "verify", .run = verify, .bytes = static_cast<double>(file->file_bytes())});
  return setup;
}

}  // namespace sqz::bench
