// `attend` and `prefill` on the CPU: our dense path, selection with attention, LibTorch, and plain
// reads of the same memory.
#include <algorithm>
#include <memory>

#include "libruntime/kernels/cpu/kernels.h"
#include "libruntime/session/session.h"
#include "tools/sqz_bench/attention_fixture.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/device_cases.h"
#include "tools/sqz_bench/memory_reads.h"
#include "tools/sqz_bench/torch_attention.h"

namespace sqz::bench {
namespace {

// A session with the outputs of its calls.
struct Serving {
  std::shared_ptr<const Fixture> fixture;
  std::unique_ptr<Session> session;
  std::vector<std::byte> out;
  std::vector<float> lse;
  int64_t calls = 0;

  Status run(int64_t round) {
    ++calls;
    AttendCall call = fixture->call(round);
    call.out = out.data();
    call.lse = lse.data();
    return session->attend(call);
  }
};

const CpuKernels* kernels_of(const Options& options) {
  for (const CpuKernels* kernels : available_cpu_kernels()) {
    if (kernels->name == options.isa) return kernels;
  }
  return nullptr;
}

Result<std::shared_ptr<Serving>> serve(const std::shared_ptr<const Fixture>& fixture,
                                       const Options& options, const Setting& setting) {
  SessionOptions session = session_of(options, *fixture, setting);
  session.kernels = kernels_of(options);
  auto serving = std::make_shared<Serving>();
  serving->fixture = fixture;
  SQZ_ASSIGN_OR_RETURN(serving->session, Session::create(fixture->served, session));
  serving->out.resize(fixture->queries[0].size());
  serving->lse.resize(static_cast<size_t>(fixture->tokens * fixture->query_heads()));
  return serving;
}

// What selection came to: fractions of keys and bytes, and the length of runs.
JsonMembers delivered(Serving& serving) {
  const Counters& counters = serving.session->counters(0);
  JsonMembers out = {
      {"keep", static_cast<double>(counters.keys_read) /
                   static_cast<double>(std::max<uint64_t>(counters.keys_possible, 1))},
      {"budget", static_cast<double>(counters.bytes_read) /
                     static_cast<double>(std::max<uint64_t>(counters.bytes_dense, 1))},
      {"selections", static_cast<double>(counters.selections) /
                         static_cast<double>(std::max<int64_t>(serving.calls, 1))}};
  const auto heads = serving.session->select(serving.fixture->call(0));
  if (!heads.ok()) return out;
  int64_t keys = 0, runs = 0;
  for (const HeadSelection& head : *heads) {
    keys += head.keys;
    runs += head.run_count;
  }
  if (runs > 0) out["keys_per_run"] = static_cast<double>(keys) / static_cast<double>(runs);
  return out;
}

Status add_ours(const std::shared_ptr<const Fixture>& fixture, const Options& options, bool blocks,
                CaseSetup& setup) {
  for (const Setting& setting : settings_of(options, blocks)) {
    SQZ_ASSIGN_OR_RETURN(const auto serving, serve(fixture, options, setting));
    Contender contender;
    contender.name = setting.name;
    contender.run = [serving](int64_t round) { return serving->run(round); };
    if (setting.levels == 0) {
      contender.bytes = fixture->kv_bytes();
      contender.flop = fixture->dense_flop();
    } else {
      contender.details = [serving] { return delivered(*serving); };
    }
    setup.contenders.push_back(std::move(contender));
  }
  return {};
}

Result<CaseSetup> attention_case(const Options& options, int64_t tokens, int64_t query_tokens,
                                 int64_t rounds, bool with_reads) {
  SQZ_ASSIGN_OR_RETURN(const auto fixture, make_fixture(options, tokens, query_tokens, with_reads,
                                                        std::min<int64_t>(rounds, 8)));
  CaseSetup setup;
  setup.shape = shape_of(*fixture, options);
  setup.rounds = rounds;
  setup.baselines = {"dense"};
  const LayerView& view = fixture->layer();
  if (with_reads) {
    setup.baselines.push_back("read");
    const auto bytes = static_cast<size_t>(2 * view.kv_heads * view.slots * view.head_dim);
    const auto region = [&](const void* data) {
      return std::span(static_cast<const std::byte*>(data), bytes);
    };
    const std::vector regions = {region(view.keys), region(view.values)};
    const auto reader = std::make_shared<MemoryReader>(options.threads);
    setup.contenders.push_back({.name = "read",
                                .run =
                                    [reader, regions, fixture](int64_t) {
                                      static_cast<void>(reader->read(regions));
                                      return Status();
                                    },
                                .bytes = 2.0 * static_cast<double>(bytes)});
  }
  SQZ_RETURN_IF_ERROR(add_ours(fixture, options, !with_reads, setup));
  if (options.torch) {
    auto torch =
        torch_contenders(options, view, fixture->exact_queries, query_tokens,
                         fixture->served->metadata().model.attention_scale, fixture->dense_flop());
    std::move(torch.begin(), torch.end(), std::back_inserter(setup.contenders));
  }
  return setup;
}

}  // namespace

Result<CaseSetup> attend_case(const Options& options) {
  if (options.gpu >= 0) return attend_device_case(options);
  return attention_case(options, options.tokens_or(131072), options.requests, options.repeat_or(25),
                        true);
}

Result<CaseSetup> prefill_case(const Options& options) {
  if (options.gpu >= 0) return prefill_device_case(options);
  return attention_case(options, options.tokens_or(32768), options.queries_or(512),
                        options.repeat_or(5), false);
}

}  // namespace sqz::bench
