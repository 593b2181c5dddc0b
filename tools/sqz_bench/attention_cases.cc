// `attend` and `prefill` on the CPU: our dense path, selection with attention, LibTorch, and plain
// reads of the same memory.
#include <algorithm>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/session/session.h"
#include "tools/sqz_bench/attention_fixture.h"
#include "tools/sqz_bench/memory_reads.h"

namespace sqz::bench {
namespace {

// A session with the outputs of its calls.
struct Serving {
  std::shared_ptr<const Fixture> fixture;
  std::unique_ptr<Session> session;
  std::vector<std::byte> out;
  std::vector<float> lse;
  int64_t calls = 0;

  AttendCall call(int64_t round) {
    const auto set = static_cast<size_t>(round) % fixture->queries.size();
    AttendCall call = fixture->call(fixture->queries[set].data());
    call.out = out.data();
    call.lse = lse.data();
    return call;
  }
};

Result<Contender> serve(const std::shared_ptr<const Fixture>& fixture, const Options& options,
                        const Setting& setting) {
  SessionOptions session = session_of(options, *fixture, setting);
  for (const CpuKernels* kernels : available_cpu_kernels()) {
    if (kernels->name == options.isa) session.kernels = kernels;
  }
  const auto serving = std::make_shared<Serving>();
  serving->fixture = fixture;
  SQZ_ASSIGN_OR_RETURN(serving->session, Session::create(fixture->served, session));
  serving->out.resize(fixture->queries[0].size());
  serving->lse.resize(static_cast<size_t>(fixture->tokens * fixture->query_heads()));
  Contender out;
  out.name = setting.name;
  out.run = [serving](int64_t round) {
    ++serving->calls;
    return serving->session->attend(serving->call(round));
  };
  if (setting.kind == Setting::kSparse) {
    out.details = [serving] {
      JsonMembers json = delivered(serving->session->counters(0), serving->calls);
      const double run = keys_per_run(*serving->session, serving->call(0));
      if (run > 0) json["keys_per_run"] = run;
      return json;
    };
  }
  return out;
}

Result<CaseSetup> attention_case(const Options& options, const AttentionCase& what) {
  SQZ_ASSIGN_OR_RETURN(const auto fixture, make_fixture(options, what));
  const LayerView& view = fixture->layer();
  const auto make = [&](const Setting& setting, int /*place*/) -> Result<Contender> {
    if (setting.kind != Setting::kRead) return serve(fixture, options, setting);
    const auto region = [&](const void* data) {
      return std::span(static_cast<const std::byte*>(data), fixture->key_bytes());
    };
    const auto [keys, values] = stored_rows(view);
    return reading("read", options.threads, {region(keys), region(values)}, fixture);
  };
  SQZ_ASSIGN_OR_RETURN(CaseSetup setup, attention_setup(*fixture, options, what, make));
  setup.baselines = {"dense"};
  if (what.requests) setup.baselines.push_back("read");
  if (options.torch && view.keys != nullptr) {
    for (Contender& one : torch_contenders(options, *fixture)) {
      setup.contenders.push_back(std::move(one));
    }
  }
  return setup;
}

}  // namespace

Result<CaseSetup> attend_case(const Options& options) {
  const int64_t rounds = options.repeat_or(25);
  return attention_case(options, {.requests = true,
                                  .tokens = options.tokens_or(131072),
                                  .query_tokens = options.requests,
                                  .rounds = rounds,
                                  .sets = std::min<int64_t>(rounds, 8)});
}

Result<CaseSetup> prefill_case(const Options& options) {
  const int64_t rounds = options.repeat_or(5);
  return attention_case(options, {.tokens = options.tokens_or(32768),
                                  .query_tokens = options.queries_or(512),
                                  .rounds = rounds,
                                  .sets = std::min<int64_t>(rounds, 8)});
}

}  // namespace sqz::bench
