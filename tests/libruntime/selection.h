// Sessions and their selections, for tests of single selectors.
#pragma once

#include <gtest/gtest.h>

#include "tests/common/must.h"
#include "tests/libruntime/served_index.h"

namespace sqz::testing {

inline SessionOptions session_options(const SelectionRequest& selection) {
  SessionOptions options;
  options.selection = selection;
  options.max_tokens = 256;
  options.threads = 2;
  return options;
}

inline std::unique_ptr<Session> open_session(const Served& served, const SessionOptions& options) {
  return must(Session::create(served.index, options));
}

inline Status refusal(const Served& served, const SelectionRequest& selection) {
  return Session::create(served.index, session_options(selection)).status();
}

// The selected slots of every KV head, for all tokens of `queries` as one block.
inline std::vector<std::vector<bool>> selected_slots(Session& session, int64_t layer,
                                                     const std::vector<float>& queries) {
  const ModelDescription& model = session.index().metadata().model;
  const int64_t tokens = std::ssize(queries) / (model.query_heads * model.head_dim);
  std::vector<std::vector<bool>> out;
  for (const HeadSelection& head :
       must(session.select(make_call(layer, tokens, queries.data(), {})))) {
    std::vector<bool>& slots = out.emplace_back(session.index().layers[layer].slots, false);
    int64_t keys = 0, end = -1;  // of the run before: runs ascend and do not touch
    for (const KeyRun& run : head.read.runs()) {
      EXPECT_GT(int64_t{run.first}, end);
      end = int64_t{run.first} + run.length;
      keys += run.length;
      EXPECT_LE(end, std::ssize(slots));
      for (int64_t s = run.first; s < std::min(end, std::ssize(slots)); ++s) slots[s] = true;
    }
    EXPECT_EQ(head.read.total, keys);
  }
  return out;
}

inline double delivered(const Session& session, int64_t layer) {
  const Counters& counters = session.counters(layer);
  return static_cast<double>(counters.bytes_read) / static_cast<double>(counters.bytes_dense);
}

}  // namespace sqz::testing
