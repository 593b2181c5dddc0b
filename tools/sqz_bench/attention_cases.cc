// `attend` and `prefill`: our dense path, selection with attention, LibTorch, and plain reads of
// the same memory.
#include <algorithm>
#include <memory>

#include "libruntime/session/session.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/memory_reads.h"
#include "tools/sqz_bench/synthetic_index.h"
#include "tools/sqz_bench/torch_attention.h"

namespace sqz::bench {
namespace {

// What the contenders of a case share.
struct Fixture {
  SyntheticIndex index;  // first: its file outlives the mapping
  std::shared_ptr<const ServedIndex> served;
  int64_t tokens = 0;  // of a call
  DType dtype = DType::kBF16;
  std::vector<std::vector<std::byte>> queries;  // sets of [tokens, Hq, d] in `dtype`

  const LayerView& layer() const { return served->layers[0]; }
  double kv_bytes() const {
    const LayerView& view = layer();
    return static_cast<double>(4 * view.kv_heads * (view.slots + view.exact) * view.head_dim);
  }
};

std::vector<std::byte> rounded(const std::vector<float>& from, DType dtype) {
  std::vector<std::byte> out;
  const auto append = [&](auto x) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&x);
    out.insert(out.end(), bytes, bytes + sizeof(x));
  };
  for (const float x : from) {
    if (dtype == DType::kBF16) append(to_bfloat16(x));
    if (dtype == DType::kF16) append(to_float16(x));
    if (dtype == DType::kF32) append(x);
  }
  return out;
}

Result<std::shared_ptr<const Fixture>> make_fixture(const Options& options, int64_t tokens,
                                                    int64_t query_tokens, int64_t sets) {
  auto fixture = std::make_shared<Fixture>();
  SQZ_ASSIGN_OR_RETURN(fixture->index, make_synthetic_index(options, tokens, sets, query_tokens));
  const OpenMode mode = options.open_mode == "read" ? OpenMode::kRead : OpenMode::kMmap;
  SQZ_ASSIGN_OR_RETURN(auto file, SqzFile::open(fixture->index.file->path(), mode));
  SQZ_ASSIGN_OR_RETURN(fixture->served, make_served_index(std::move(file)));
  fixture->tokens = query_tokens;
  fixture->dtype = options.query_dtype == "f32"   ? DType::kF32
                   : options.query_dtype == "f16" ? DType::kF16
                                                  : DType::kBF16;
  for (const auto& set : fixture->index.queries) {
    fixture->queries.push_back(rounded(set, fixture->dtype));
  }
  return std::shared_ptr<const Fixture>(std::move(fixture));
}

// A session with the outputs of its calls.
struct Serving {
  std::shared_ptr<const Fixture> fixture;
  std::unique_ptr<Session> session;
  std::vector<std::byte> out;
  std::vector<float> lse;

  Status run(int64_t round) {
    const auto& queries = fixture->queries;
    AttendCall call;
    call.tokens = fixture->tokens;
    call.dtype = fixture->dtype;
    call.q = queries[static_cast<size_t>(round) % queries.size()].data();
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
                                       const Options& options, int levels) {
  SessionOptions session;
  session.threads = options.threads;
  session.max_tokens = fixture->tokens;
  session.block = options.block;
  session.kernels = kernels_of(options);
  if (levels == 0) {
    session.selection.selector = SelectorKind::kDense;
  } else {
    session.selection.levels = levels;
    session.selection.keep = 1 - options.sparsity;
    session.selection.rule = options.rule == "budget" ? RuleKind::kBudget : RuleKind::kThreshold;
  }
  auto serving = std::make_shared<Serving>();
  serving->fixture = fixture;
  SQZ_ASSIGN_OR_RETURN(serving->session, Session::create(fixture->served, session));
  serving->out.resize(fixture->queries[0].size());
  serving->lse.resize(static_cast<size_t>(fixture->tokens * options.query_heads));
  return serving;
}

// What selection came to: fractions of keys and bytes, and the length of runs.
Json delivered(Serving& serving) {
  const Counters& counters = serving.session->counters(0);
  Json out = {{"keep", static_cast<double>(counters.keys_read) /
                           static_cast<double>(std::max<uint64_t>(counters.keys_possible, 1))},
              {"budget", static_cast<double>(counters.bytes_read) /
                             static_cast<double>(std::max<uint64_t>(counters.bytes_dense, 1))}};
  AttendCall call;
  call.tokens = serving.fixture->tokens;
  call.dtype = serving.fixture->dtype;
  call.q = serving.fixture->queries[0].data();
  const auto heads = serving.session->select(call);
  if (!heads.ok()) return out;
  int64_t keys = 0, runs = 0;
  for (const HeadSelection& head : *heads) {
    keys += head.keys;
    runs += head.run_count;
  }
  if (runs > 0) out["keys_per_run"] = static_cast<double>(keys) / static_cast<double>(runs);
  return out;
}

Status add_ours(const std::shared_ptr<const Fixture>& fixture, const Options& options, double flop,
                CaseSetup& setup) {
  std::vector<int> levels = {0};
  levels.insert(levels.end(), options.levels.begin(), options.levels.end());
  for (const int level : levels) {
    SQZ_ASSIGN_OR_RETURN(const auto serving, serve(fixture, options, level));
    Contender contender;
    contender.name =
        level == 0 ? "dense" : concat("sparse, ", level, level > 1 ? " levels" : " level");
    contender.run = [serving](int64_t round) { return serving->run(round); };
    if (level == 0) {
      contender.bytes = fixture->kv_bytes();
      contender.flop = flop;
    } else {
      contender.details = [serving] { return delivered(*serving); };
    }
    setup.contenders.push_back(std::move(contender));
  }
  return {};
}

Json shape_of(const Fixture& fixture, const Options& options) {
  const LayerView& view = fixture.layer();
  Json clusters = Json::array();
  for (int k = 0; k < view.levels; ++k) clusters.push_back(view.level[k].clusters);
  return {{"tokens", fixture.served->metadata().tokens},
          {"query_heads", options.query_heads},
          {"kv_heads", options.kv_heads},
          {"head_dim", options.head_dim},
          {"dtype", dtype_name(view.dtype)},
          {"query_dtype", options.query_dtype},
          {"query_tokens", fixture.tokens},
          {"block", options.block},
          {"clusters", clusters},
          {"sparsity", options.sparsity},
          {"rule", options.rule},
          {"open", options.open_mode}};
}

Result<CaseSetup> attention_case(const Options& options, int64_t tokens, int64_t query_tokens,
                                 int64_t rounds, bool with_reads) {
  SQZ_ASSIGN_OR_RETURN(const auto fixture,
                       make_fixture(options, tokens, query_tokens, std::min<int64_t>(rounds, 8)));
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
  const double flop = 4.0 * static_cast<double>(query_tokens * options.query_heads *
                                                options.head_dim * (view.slots + view.exact));
  SQZ_RETURN_IF_ERROR(add_ours(fixture, options, flop, setup));
  if (options.torch) {
    auto torch = torch_contenders(options, view, fixture->index.queries, query_tokens,
                                  fixture->served->metadata().model.attention_scale, flop);
    std::move(torch.begin(), torch.end(), std::back_inserter(setup.contenders));
  }
  return setup;
}

}  // namespace

Result<CaseSetup> attend_case(const Options& options) {
  return attention_case(options, options.tokens_or(131072), 1, options.repeat_or(25), true);
}

Result<CaseSetup> prefill_case(const Options& options) {
  return attention_case(options, options.tokens_or(32768), options.queries, options.repeat_or(5),
                        false);
}

}  // namespace sqz::bench
