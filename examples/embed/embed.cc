// Serves attention over a fixed context from an index, with libruntime alone: what an engine does
// a layer at a time, as a program.
//
//   sqz-index capture --model MODEL book.txt -o book.h5     queries to play with
//   embed book.sqz --capture book.h5 --budget 0.125 --compare
//   SQZ_LAYER=3 embed book.sqz --format f32 < queries.f32
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <exception>
#include <iostream>
#include <numeric>
#include <sqz/sqz.hpp>

#include "options.h"
#include "queries.h"

namespace {

namespace rt = sqz::runtime;

struct State {
  std::vector<float> out;  // [T, Hq, d]
  std::vector<float> lse;  // [T, Hq], natural logarithm
};

// One call of an engine: the queries of `layer`, which follow the fixed context.
State attend(rt::Session& session, const sqz_index_info& info, int64_t layer,
             std::vector<float>& q) {
  const int64_t tokens = static_cast<int64_t>(q.size()) / (info.query_heads * info.head_dim);
  State state{std::vector<float>(q.size()),
              std::vector<float>(static_cast<size_t>(tokens * info.query_heads))};
  int64_t shape[] = {tokens, info.query_heads, info.head_dim};
  const sqz_tensor q_tensor = rt::f32_tensor(q.data(), shape, 3);
  sqz_tensor out_tensor = rt::f32_tensor(state.out.data(), shape, 3);
  sqz_tensor lse_tensor = rt::f32_tensor(state.lse.data(), shape, 2);
  std::vector<int64_t> positions(static_cast<size_t>(tokens));  // for layers with a window
  std::iota(positions.begin(), positions.end(), info.tokens);
  auto args = rt::make<sqz_attend_args>();
  args.layer = layer;
  args.q = &q_tensor;
  args.out = &out_tensor;
  args.lse = &lse_tensor;
  args.positions = positions.data();
  session.attend(args);
  return state;
}

double norm(const std::vector<float>& x) {
  double sum = 0;
  for (const float value : x) sum += static_cast<double>(value) * value;
  return std::sqrt(sum);
}

void print_state(int64_t layer, const State& state, int64_t heads) {
  const auto [low, high] = std::minmax_element(state.lse.begin(), state.lse.end());
  const double sum = std::accumulate(state.lse.begin(), state.lse.end(), 0.0);
  std::printf("layer %lld: %zu queries, |out| %.6g, lse %.6g to %.6g, mean %.6g",
              static_cast<long long>(layer), state.lse.size() / static_cast<size_t>(heads),
              norm(state.out), *low, *high, sum / static_cast<double>(state.lse.size()));
}

void print_error(const State& sparse, const State& dense) {
  std::vector<float> difference(sparse.out.size());
  std::transform(sparse.out.begin(), sparse.out.end(), dense.out.begin(), difference.begin(),
                 [](float a, float b) { return a - b; });
  std::printf(", error %.4g", norm(difference) / norm(dense.out));
}

void print_stats(const sqz_stats& stats) {
  std::printf("read %llu of %llu bytes: budget %.4f asked, %.4f delivered; %llu of %llu keys%s\n",
              static_cast<unsigned long long>(stats.bytes_read),
              static_cast<unsigned long long>(stats.bytes_dense), stats.asked_budget,
              stats.delivered_budget, static_cast<unsigned long long>(stats.keys_read),
              static_cast<unsigned long long>(stats.keys_possible),
              stats.dense_fallback ? "; selection would not pay, everything was read" : "");
}

void run(const embed::Options& options) {
  const rt::Index index(options.index, options.read ? SQZ_OPEN_READ : SQZ_OPEN_MMAP);
  const sqz_index_info info = index.describe();
  const bool all = options.layer < 0 && !options.capture.empty();
  const int64_t first = std::max<int64_t>(options.layer, 0);
  const int64_t end = all ? info.layers : first + 1;
  if (end > info.layers) {
    throw std::runtime_error("--layer: found " + std::to_string(first) + ", the index has " +
                             std::to_string(info.layers) + " layers");
  }
  sqz_session_options session_options = options.session;
  std::vector<std::vector<float>> queries;  // from `first` on
  size_t longest = 1;
  for (int64_t layer = first; layer < end; ++layer) {
    queries.push_back(
        options.capture.empty()
            ? embed::read_queries(std::cin, options.format, info.query_heads, info.head_dim)
            : embed::read_capture(options.capture, layer, info.query_heads, info.head_dim));
    longest = std::max(longest, queries.back().size());
  }
  session_options.max_tokens = static_cast<int64_t>(longest) / (info.query_heads * info.head_dim);
  rt::Session session(index, session_options);
  auto dense_options = rt::dense_options();
  dense_options.max_tokens = session_options.max_tokens;
  dense_options.threads = session_options.threads;
  rt::Session dense(index, dense_options);
  for (int64_t layer = first; layer < end; ++layer) {
    std::vector<float>& q = queries[static_cast<size_t>(layer - first)];
    const State state = attend(session, info, layer, q);
    print_state(layer, state, info.query_heads);
    if (options.compare) print_error(state, attend(dense, info, layer, q));
    std::printf("\n");
  }
  print_stats(session.stats());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const auto options = embed::parse_options(argc, argv);
    if (options) run(*options);
    return 0;
  } catch (const sqz::runtime::Error& error) {
    std::fprintf(stderr, "embed: %s\n", error.what());
    return 3;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "embed: %s\n", error.what());
    return 2;
  }
}
