// Serves attention over a fixed context from an index, with libruntime alone: what an engine does
// a layer at a time, as a program. It attends within the budget and densely, and prints how far
// the two are apart.
//
//   sqz-index capture --model MODEL book.txt -o book.h5     queries to play with
//   embed book.sqz --capture book.h5 --budget 0.125
#include <boost/program_options.hpp>
#include <cmath>
#include <iostream>
#include <numeric>
#include <sqz/sqz.hpp>

#include "queries.h"

namespace {

namespace po = boost::program_options;
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
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

void run(const po::variables_map& given) {
  const rt::Index index(given["index"].as<std::string>());
  const sqz_index_info info = index.describe();
  auto options = rt::options_for_budget(given["budget"].as<double>());
  options.threads = given["threads"].as<int32_t>();
  rt::Session session(index, options);
  rt::Session dense(index, rt::dense_options());
  const bool captured = given.count("capture") != 0;
  for (int64_t layer = 0; layer < (captured ? info.layers : 1); ++layer) {
    std::vector<float> q = captured ? read_capture(given["capture"].as<std::string>(), layer,
                                                   info.query_heads, info.head_dim)
                                    : read_queries(std::cin, info.query_heads, info.head_dim);
    const State state = attend(session, info, layer, q);
    std::vector<float> error = attend(dense, info, layer, q).out;
    const double length = norm(error);
    for (size_t i = 0; i < error.size(); ++i) error[i] -= state.out[i];
    const auto count = static_cast<double>(state.lse.size());
    std::cout << "layer " << layer << ": " << state.lse.size() << " queries, |out| "
              << norm(state.out) << ", mean lse "
              << std::accumulate(state.lse.begin(), state.lse.end(), 0.0) / count << ", error "
              << norm(error) / length << "\n";
  }
  const sqz_stats stats = session.stats();
  std::cout << "budget " << stats.asked_budget << " asked, " << stats.delivered_budget
            << " delivered; read " << stats.keys_read << " of " << stats.keys_possible << " keys\n";
}

}  // namespace

int main(int argc, char** argv) {
  po::options_description known("usage: embed INDEX.sqz [OPTIONS]");
  auto add = known.add_options();
  add("help,h", "print this and exit");
  add("index", po::value<std::string>()->required(), "the index; also without --index");
  add("capture", po::value<std::string>(),
      "queries of all layers (HDF5); without it, numbers on standard input for layer 0");
  add("budget", po::value<double>()->default_value(0.125), "share of the context's bytes to read");
  add("threads", po::value<int32_t>()->default_value(0), "CPU threads; 0: all cores");
  po::positional_options_description position;
  position.add("index", 1);
  try {
    po::variables_map given;
    po::store(po::command_line_parser(argc, argv).options(known).positional(position).run(), given);
    if (given.count("help") != 0) {
      std::cout << known;
      return 0;
    }
    po::notify(given);
    run(given);
    return 0;
  } catch (const std::exception& error) {
    std::cerr << "embed: " << error.what() << "\n";
    return 1;
  }
}
