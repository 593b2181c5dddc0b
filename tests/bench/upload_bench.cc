// Uploads of an index from the page cache to the GPU: upload_bench [GIB [THREADS]]
// The index is a file of holes with a real header (32 layers of Llama-3.1-8B); what was read once
// is in the page cache. Figures: docs/performance.md.
#include <chrono>
#include <cstdio>
#include <cstdlib>

#include "libruntime/cuda/device_index.h"
#include "tests/common/temporary_directory.h"
#include "tests/common/tiny_index.h"
#include "tools/sqz_bench/sparse_index.h"

namespace {

using namespace sqz;

template <class T>
T value(Result<T> result) {
  if (result.ok()) return std::move(*result);
  std::fprintf(stderr, "upload_bench: %s\n", result.status().message().c_str());
  std::exit(1);
}

// What make_served_index() makes, without reading offsets that are holes.
std::shared_ptr<const ServedIndex> serve(const std::string& path) {
  auto served = std::make_shared<ServedIndex>();
  served->file = value(SqzFile::open(path));
  const ModelDescription& model = served->metadata().model;
  for (int64_t l = 0; l < model.layers; ++l) {
    served->layers.push_back(served->file->layer(l));
    LayerTable table;
    for (int k = 0; k < served->layers.back().levels; ++k) {
      const auto count =
          static_cast<size_t>(model.kv_heads * served->layers.back().level[k].clusters);
      table.level[k] = {std::vector<uint32_t>(count), std::vector<float>(count)};
    }
    served->tables.push_back(std::move(table));
  }
  return served;
}

}  // namespace

int main(int argc, char** argv) {
  const double gib = argc > 1 ? std::atof(argv[1]) : 16;
  const int threads = argc > 2 ? std::atoi(argv[2]) : 0;
  testing::TinyIndexOptions options;
  options.layers = 32;
  options.query_heads = 32;
  options.kv_heads = 8;
  options.head_dim = 128;
  options.sink = 16;
  options.tail = 100;
  options.tokens = static_cast<int64_t>(gib * 0x1p30 / (32 * 4096));
  options.clusters = {options.tokens / 100, options.tokens / 20};
  const IndexMetadata metadata = testing::tiny::metadata(options);
  const int64_t exact = options.sink + options.tail;
  const std::vector<LayerShape> shapes(32, {options.clusters, options.tokens - exact, exact});
  const testing::TemporaryDirectory directory;
  const std::string path = directory.file("sparse.sqz");
  value(bench::write_sparse_index(Env::posix(), path, metadata, shapes));
  const auto served = serve(path);
  for (int round = 0; round < 4; ++round) {
    const auto start = std::chrono::steady_clock::now();
    const auto seconds = [&] {
      return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    };
    const auto index =
        value(cuda::upload_index(served, {.device = 0, .threads = threads, .wait = false}));
    const bool ok = index->wait(0).ok();
    const double first = seconds();
    const bool all = index->wait(31).ok();
    const double last = seconds();
    std::printf(
        "%s, %d threads (0 = the default): %.2f GB in %.3f s, %.1f GB/s; layer 0 after %.3f s%s\n",
        round == 0 ? "from holes" : "from the page cache", threads,
        static_cast<double>(index->bytes()) * 1e-9, last,
        static_cast<double>(index->bytes()) * 1e-9 / last, first, ok && all ? "" : " FAILED");
  }
  return 0;
}
