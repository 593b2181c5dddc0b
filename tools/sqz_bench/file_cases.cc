// `bandwidth`, `open` and `verify`.
#include <algorithm>
#include <memory>

#include "formats/sqz_file.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/memory_reads.h"
#include "tools/sqz_bench/sparse_index.h"
#include "tools/sqz_bench/synthetic_index.h"

namespace sqz::bench {
namespace {

int64_t token_bytes(const Options& options) {
  return 4 * options.kv_heads * options.head_dim;  // key and value in 16 bits
}

LayerShape shape_of(const IndexMetadata& metadata) {
  const int64_t exact = metadata.sink + metadata.tail, slots = metadata.tokens - exact;
  return {synthetic_clusters(metadata.tokens, slots), slots, exact};
}

// Opens the index at `file`, which it removes at the end.
Contender opener(const std::string& name, std::shared_ptr<TemporaryFile> file, uint64_t bytes) {
  return {.name = name,
          .run = [file](int64_t) { return SqzFile::open(file->path()).status(); },
          .details =
              [bytes] {
                return JsonMembers{{"file_bytes", bytes}};
              }};
}

Result<Contender> sparse_opener(const Options& options, const std::string& name, double file_bytes,
                                int64_t layers) {
  const auto tokens =
      static_cast<int64_t>(file_bytes / static_cast<double>(layers * token_bytes(options)));
  const IndexMetadata metadata = made_metadata(options, std::max<int64_t>(tokens, 1000), layers);
  SQZ_ASSIGN_OR_RETURN(std::shared_ptr<TemporaryFile> file,
                       TemporaryFile::create(options.directory, "sqz-bench-sparse"));
  const std::vector<LayerShape> shapes(static_cast<size_t>(layers), shape_of(metadata));
  SQZ_ASSIGN_OR_RETURN(const uint64_t bytes,
                       write_sparse_index(Env::posix(), file->path(), metadata, shapes));
  return opener(name, std::move(file), bytes);
}

}  // namespace

Result<CaseSetup> bandwidth_case(const Options& options) {
  const int64_t tokens = options.tokens_or(131072);
  const auto bytes = static_cast<size_t>(tokens * token_bytes(options));
  // Written, so that the pages are there and differ from the one page of zeros.
  const auto memory = std::make_shared<std::vector<std::byte>>(bytes, std::byte{1});
  CaseSetup setup;
  setup.shape = {{"bytes", bytes}};
  setup.rounds = options.repeat_or(25);
  std::vector<int> counts = {1};
  for (int threads = 2; threads < options.threads; threads *= 2) counts.push_back(threads);
  if (options.threads > 1) counts.push_back(options.threads);
  for (const int threads : counts) {
    const auto reader = std::make_shared<MemoryReader>(threads);
    setup.contenders.push_back(
        {.name = concat("read, ", threads, threads > 1 ? " threads" : " thread"),
         .run =
             [memory, reader](int64_t) {
               static_cast<void>(reader->read({std::span(*memory)}));
               return Status();
             },
         .bytes = static_cast<double>(bytes)});
  }
  setup.baselines = {setup.contenders.front().name};
  return setup;
}

Result<CaseSetup> open_case(const Options& options) {
  CaseSetup setup;
  const double gib = options.file_gib_or(100);
  setup.shape = {{"layers", options.file_layers}, {"file_gib", gib}};
  setup.rounds = options.repeat_or(100);
  const double bytes = gib * 0x1p30;
  SQZ_ASSIGN_OR_RETURN(auto large,
                       sparse_opener(options, concat(gib, " GiB"), bytes, options.file_layers));
  SQZ_ASSIGN_OR_RETURN(auto small,
                       sparse_opener(options, "1/100 of it", bytes / 100, options.file_layers));
  SQZ_ASSIGN_OR_RETURN(auto single,
                       sparse_opener(options, "one layer of it",
                                     bytes / static_cast<double>(options.file_layers), 1));
  setup.contenders = {std::move(large), std::move(small), std::move(single)};
  setup.baselines = {setup.contenders.front().name};
  return setup;
}

Result<CaseSetup> verify_case(const Options& options) {
  SQZ_ASSIGN_OR_RETURN(const std::shared_ptr<TemporaryFile> index,
                       make_synthetic_index(options, options.tokens_or(131072)));
  SQZ_ASSIGN_OR_RETURN(const std::shared_ptr<const SqzFile> file, SqzFile::open(index->path()));
  SQZ_ASSIGN_OR_RETURN(
      const std::shared_ptr<const Mapping> mapping, [&]() -> Result<std::unique_ptr<Mapping>> {
        SQZ_ASSIGN_OR_RETURN(const auto opened, Env::posix().open_read(index->path()));
        return opened->map();
      }());
  CaseSetup setup;
  const auto bytes = static_cast<double>(file->file_bytes());
  setup.shape = {{"file_bytes", file->file_bytes()}};
  setup.rounds = options.repeat_or(9);
  setup.baselines = {"read"};
  const auto reader = std::make_shared<MemoryReader>(options.threads);
  setup.contenders.push_back({.name = "read",
                              .run =
                                  [reader, mapping](int64_t) {
                                    static_cast<void>(reader->read({mapping->bytes()}));
                                    return Status();
                                  },
                              .bytes = bytes});
  setup.contenders.push_back({.name = "verify",
                              .run = [index, file, threads = options.threads](int64_t) -> Status {
                                SQZ_ASSIGN_OR_RETURN(const auto report, file->verify({}, threads));
                                if (report.problems.empty()) return {};
                                return {Code::kInternal, report.problems.front()};
                              },
                              .bytes = bytes});
  return setup;
}

}  // namespace sqz::bench
