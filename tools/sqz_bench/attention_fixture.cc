#include "tools/sqz_bench/attention_fixture.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "libindex/compress.h"
#include "libruntime/session/session.h"

namespace sqz::bench {
namespace {

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

Result<std::shared_ptr<const ServedIndex>> open_served(const std::string& path, OpenMode mode) {
  SQZ_ASSIGN_OR_RETURN(auto file, SqzFile::open(path, mode));
  return make_served_index(std::move(file));
}

// --levels: in use, at most.
Status check_index(const ServedIndex& index, const Options& options) {
  const std::string& selector = options.selector;
  const LayerView& view = index.layers[0];
  const int levels = *std::max_element(options.levels.begin(), options.levels.end());
  const auto refuse = [&](const std::string& found, const std::string& expected) {
    return Status(Code::kInvalidArgument,
                  bad_field(index.file->path(), "layer 0", found, expected));
  };
  if (selector == "squeezed") {
    if (view.levels >= levels && index.metadata().has_kv) return {};
    return refuse(concat(view.levels, " levels of clusters"),
                  concat(levels, " or more (--levels), with keys and values"));
  }
  const bool saap = selector == "saap";
  if ((saap ? view.buckets : view.pages) > 0 && view.keys != nullptr) return {};
  return refuse(concat("no ", saap ? "buckets" : "pages", ", or no keys and values"),
                concat("both: --selector ", selector));
}

std::vector<Setting> settings_of(const Options& options, bool requests) {
  std::vector<Setting> out;
  if (requests) out.push_back({Setting::kRead, "read"});
  out.push_back({Setting::kDense, "dense"});
  const bool other = options.selector != "squeezed";
  const std::vector<int> levels = other ? std::vector<int>{1} : options.levels;
  for (const int64_t block : options.block) {
    for (const double sparsity : options.sparsity) {
      for (const int level : levels) {
        const std::string share =
            options.sparsity.size() > 1 || other ? concat(100 * sparsity, " % sparse") : "sparse";
        const std::string what =
            other ? options.selector : concat(level, level > 1 ? " levels" : " level");
        const std::string cut = requests || options.block.size() == 1 ? ""
                                : block == 0                          ? ", one block"
                                             : concat(", blocks of ", block);
        out.push_back({Setting::kSparse, concat(share, ", ", what, cut), level, sparsity, block});
      }
    }
    if (requests) break;  // of one token: a block is a token
  }
  return out;
}

}  // namespace

size_t Fixture::key_bytes() const {
  const LayerView& view = layer();
  const int64_t bits = view.coded_values.bits > 0 ? view.coded_values.bits : 16;
  return static_cast<size_t>(view.kv_heads * view.slots * view.head_dim * bits / 8);
}

double Fixture::dense_flop() const {
  const LayerView& view = layer();
  return 4.0 * static_cast<double>(tokens * query_heads() * view.head_dim) *
         static_cast<double>(view.slots + view.exact);
}

AttendCall Fixture::call(const void* q) const {
  AttendCall call;
  call.tokens = tokens;
  call.dtype = dtype;
  call.q = q;
  if (before_rope) call.q_before_rope = q;
  if (!indptr.empty()) {
    call.indptr = indptr.data();
    call.requests = std::ssize(indptr) - 1;
  }
  return call;
}

std::vector<float> widened(const std::vector<std::byte>& from, DType dtype) {
  const auto size = static_cast<size_t>(dtype_size(dtype));
  std::vector<float> out(from.size() / size);
  const auto widen = [&]<class T>(T x) {
    for (size_t i = 0; i < out.size(); ++i) {
      std::memcpy(&x, from.data() + i * size, size);
      if constexpr (std::is_same_v<T, float>) out[i] = x;
      if constexpr (!std::is_same_v<T, float>) out[i] = to_float(x);
    }
  };
  if (dtype == DType::kBF16) widen(BFloat16{});
  if (dtype == DType::kF16) widen(Float16{});
  if (dtype == DType::kF32) widen(0.0f);
  return out;
}

Result<std::vector<std::vector<float>>> dense_outputs(const Fixture& fixture, int threads,
                                                      size_t sets) {
  SessionOptions options;
  options.threads = threads;
  options.max_tokens = fixture.tokens;
  options.selection.selector = SelectorKind::kDense;
  SQZ_ASSIGN_OR_RETURN(const auto session, Session::create(fixture.whole, options));
  std::vector<std::vector<float>> out;
  std::vector<float> lse(static_cast<size_t>(fixture.tokens * fixture.query_heads()));
  for (size_t set = 0; set < std::min(sets, fixture.queries.size()); ++set) {
    AttendCall call = fixture.call(fixture.queries[set].data());
    std::vector<std::byte> bytes(fixture.queries[set].size());
    call.out = bytes.data();
    call.lse = lse.data();
    SQZ_RETURN_IF_ERROR(session->attend(call));
    out.push_back(widened(bytes, fixture.dtype));
  }
  return out;
}

Result<std::shared_ptr<const Fixture>> make_fixture(const Options& asked,
                                                    const AttentionCase& what) {
  CompressOptions compress;
  compress.rows = rows_of(asked.rows);
  compress.key_codes = asked.key_codes;
  Options options = asked;
  if (compress.any()) options.save_index.clear();
  auto fixture = std::make_shared<Fixture>();
  fixture->keys = "made up";
  fixture->before_rope = options.selector == "saap";
  std::string path = options.index;
  if (!path.empty()) {
    fixture->keys = path;
  } else if (!options.capture.empty()) {
    SQZ_ASSIGN_OR_RETURN(CapturedIndex made,
                         make_captured_index(options, what.tokens, what.sets, what.query_tokens));
    fixture->file = std::move(made.file);
    fixture->exact_queries = std::move(made.queries);
    fixture->keys = options.capture + ", tiled";
  } else {
    SQZ_ASSIGN_OR_RETURN(fixture->file, make_index(options, what.tokens));
  }
  if (fixture->file != nullptr) path = fixture->file->path();
  const OpenMode mode = options.open_mode == "read" ? OpenMode::kRead : OpenMode::kMmap;
  SQZ_ASSIGN_OR_RETURN(fixture->served, open_served(path, mode));
  fixture->whole = fixture->served;
  if (compress.any()) {
    fixture->whole_file = std::move(fixture->file);
    SQZ_ASSIGN_OR_RETURN(fixture->file, IndexFile::create(asked));
    path = fixture->file->path();
    SQZ_RETURN_IF_ERROR(
        compress_index(Env::posix(), *fixture->whole->file, compress, path, true, options.threads)
            .status());
    SQZ_ASSIGN_OR_RETURN(fixture->served, open_served(path, mode));
  }
  SQZ_RETURN_IF_ERROR(check_index(*fixture->served, options));
  fixture->tokens = what.query_tokens;
  if (what.requests && what.query_tokens > 1) {
    fixture->indptr.resize(static_cast<size_t>(what.query_tokens) + 1);
    std::iota(fixture->indptr.begin(), fixture->indptr.end(), 0);
  }
  fixture->dtype = options.query_dtype == "f32"   ? DType::kF32
                   : options.query_dtype == "f16" ? DType::kF16
                                                  : DType::kBF16;
  if (fixture->exact_queries.empty()) {
    fixture->exact_queries =
        make_queries(*fixture->served->file, options, what.sets, what.query_tokens);
  }
  for (const auto& set : fixture->exact_queries) {
    fixture->queries.push_back(rounded(set, fixture->dtype));
  }
  return std::shared_ptr<const Fixture>(std::move(fixture));
}

SessionOptions session_of(const Options& options, const Fixture& fixture, const Setting& setting) {
  SessionOptions session;
  session.threads = options.threads;
  session.max_tokens = fixture.tokens;
  session.block = setting.block;
  SelectionRequest& selection = session.selection;
  if (setting.kind == Setting::kDense) {
    selection.selector = SelectorKind::kDense;
    return session;
  }
  selection.keep = 1 - setting.sparsity;
  if (options.selector == "squeezed") {
    selection.levels = setting.levels;
    selection.estimate = fixture.served->metadata().key_codes > 0;
    selection.rule = options.rule == "budget" ? RuleKind::kBudget : RuleKind::kThreshold;
  } else {
    selection.selector = options.selector == "quest" ? SelectorKind::kQuest : SelectorKind::kSaap;
    selection.dense_layers = -1;
  }
  return session;
}

Result<CaseSetup> attention_setup(const Fixture& fixture, const Options& options,
                                  const AttentionCase& what, const MakeContender& make) {
  const LayerView& view = fixture.layer();
  std::vector<int64_t> clusters;
  for (int k = 0; k < view.levels; ++k) clusters.push_back(view.level[k].clusters);
  CaseSetup setup;
  setup.shape = {{"tokens", fixture.served->metadata().tokens},
                 {"query_heads", fixture.query_heads()},
                 {"kv_heads", view.kv_heads},
                 {"head_dim", view.head_dim},
                 {"dtype", dtype_name(view.dtype)},
                 {"query_dtype", options.query_dtype},
                 {"query_tokens", fixture.tokens},
                 {"requests", fixture.indptr.empty() ? 1 : std::ssize(fixture.indptr) - 1},
                 {"block", options.block},
                 {"clusters", clusters},
                 {"selector", options.selector},
                 {"buckets", view.buckets},
                 {"hidden", view.classifier.hidden},
                 {"pages", view.pages},
                 {"keys", fixture.keys},
                 {"sparsity", options.sparsity},
                 {"coarse_keep", options.coarse_keep},
                 {"rows", rows_name(fixture.served->metadata().rows)},
                 {"key_codes", fixture.served->metadata().key_codes},
                 {"rule", options.rule},
                 {"open", options.open_mode}};
  setup.rounds = what.rounds;
  for (const Setting& setting : settings_of(options, what.requests)) {
    SQZ_ASSIGN_OR_RETURN(Contender contender,
                         make(setting, static_cast<int>(setup.contenders.size())));
    const auto clustered = 2.0 * static_cast<double>(fixture.key_bytes());
    if (setting.kind == Setting::kRead) contender.bytes = clustered;
    if (setting.kind == Setting::kDense) {
      contender.bytes =
          clustered + static_cast<double>(4 * view.kv_heads * view.exact * view.head_dim);
      contender.flop = fixture.dense_flop();
    }
    setup.contenders.push_back(std::move(contender));
  }
  return setup;
}

JsonMembers delivered(const Counters& counters, int64_t calls) {
  const auto fraction = [](auto part, auto whole) {
    return static_cast<double>(part) / static_cast<double>(std::max<decltype(whole)>(whole, 1));
  };
  return {{"keep", fraction(counters.keys_read, counters.keys_possible)},
          {"budget", fraction(counters.bytes_read, counters.bytes_dense)},
          {"selections", fraction(counters.selections, calls)}};
}

double keys_per_run(ServingSession& session, const AttendCall& call) {
  const auto heads = session.select(call);
  if (!heads.ok()) return 0;
  int64_t keys = 0, runs = 0;
  for (const HeadSelection& head : *heads) {
    keys += head.keys;
    runs += head.run_count;
  }
  return runs == 0 ? 0 : static_cast<double>(keys) / static_cast<double>(runs);
}

}  // namespace sqz::bench
