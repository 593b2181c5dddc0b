#include "tools/sqz_bench/attention_fixture.h"

#include <numeric>

#include "tools/sqz_bench/captured_index.h"
#include "tools/sqz_bench/random_index.h"
#include "tools/sqz_bench/synthetic_index.h"

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

// Of the selectors that are served from indexes of random keys.
bool is_random(const Options& options) {
  return options.selector != "squeezed";
}

Status check_index(const ServedIndex& index, const std::string& selector) {
  const LayerView& view = index.layers[0];
  const int64_t parts = selector == "saap" ? view.buckets : view.pages;
  if (selector != "squeezed") {
    if (parts > 0 && view.keys != nullptr) return {};
    const char* name = selector == "saap" ? "buckets" : "pages";
    return {Code::kInvalidArgument,
            bad_field(index.file->path(), "layer 0", concat("no ", name, ", or no keys and values"),
                      concat("both: --selector ", selector))};
  }
  if (view.levels == 2 && view.keys != nullptr) return {};
  return {Code::kInvalidArgument,
          bad_field(index.file->path(), "layer 0", concat(view.levels, " levels of clusters"),
                    "two, with keys and values")};
}

}  // namespace

double Fixture::kv_bytes() const {
  const LayerView& view = layer();
  return static_cast<double>(4 * view.kv_heads * (view.slots + view.exact) * view.head_dim);
}

double Fixture::dense_flop() const {
  const LayerView& view = layer();
  return 4.0 * static_cast<double>(tokens * query_heads() * view.head_dim) *
         static_cast<double>(view.slots + view.exact);
}

AttendCall Fixture::call(int64_t set) const {
  AttendCall call;
  call.tokens = tokens;
  call.dtype = dtype;
  call.q = queries[static_cast<size_t>(set) % queries.size()].data();
  if (before_rope) call.q_before_rope = call.q;
  if (!indptr.empty()) {
    call.indptr = indptr.data();
    call.requests = std::ssize(indptr) - 1;
  }
  return call;
}

std::vector<Setting> settings_of(const Options& options, bool blocks) {
  std::vector<Setting> out = {{0, 0, 0, "dense"}};
  const std::vector<int> levels = is_random(options) ? std::vector<int>{1} : options.levels;
  for (const int64_t block : options.block) {
    for (const double sparsity : options.sparsity) {
      for (const int level : levels) {
        const bool many_blocks = blocks && options.block.size() > 1;
        const std::string share = options.sparsity.size() > 1 || is_random(options)
                                      ? concat(100 * sparsity, " % sparse")
                                      : "sparse";
        const std::string what =
            is_random(options) ? options.selector : concat(level, level > 1 ? " levels" : " level");
        const std::string cut = !many_blocks ? ""
                                : block == 0 ? ", one block"
                                             : concat(", blocks of ", block);
        out.push_back({level, sparsity, block, concat(share, ", ", what, cut)});
      }
    }
    if (!blocks) break;
  }
  return out;
}

SessionOptions session_of(const Options& options, const Fixture& fixture, const Setting& setting) {
  SessionOptions session;
  session.threads = options.threads;
  session.max_tokens = fixture.tokens;
  session.block = setting.block;
  if (setting.levels == 0) {
    session.selection.selector = SelectorKind::kDense;
  } else if (is_random(options)) {
    const bool pages = options.selector == "quest";
    session.selection.selector = pages ? SelectorKind::kQuest : SelectorKind::kSaap;
    session.selection.dense_layers = -1;
    session.selection.keep = 1 - setting.sparsity;
  } else {
    session.selection.levels = setting.levels;
    session.selection.keep = 1 - setting.sparsity;
    session.selection.rule = options.rule == "budget" ? RuleKind::kBudget : RuleKind::kThreshold;
  }
  return session;
}

Result<std::shared_ptr<const Fixture>> make_fixture(const Options& options, int64_t tokens,
                                                    int64_t query_tokens, bool requests,
                                                    int64_t sets) {
  auto fixture = std::make_shared<Fixture>();
  fixture->keys = "made up";
  fixture->before_rope = options.selector == "saap";
  std::string path = options.index;
  if (!path.empty()) {
    fixture->keys = path;
  } else if (!options.capture.empty()) {
    SQZ_ASSIGN_OR_RETURN(MadeIndex made, make_captured_index(options, tokens, sets, query_tokens));
    fixture->file = std::move(made.file);
    fixture->exact_queries = std::move(made.queries);
    fixture->keys = options.capture + ", tiled";
  } else if (is_random(options)) {
    SQZ_ASSIGN_OR_RETURN(fixture->file, make_random_index(options, tokens));
  } else {
    SQZ_ASSIGN_OR_RETURN(fixture->file, make_synthetic_index(options, tokens));
  }
  if (fixture->file != nullptr) path = fixture->file->path();
  const OpenMode mode = options.open_mode == "read" ? OpenMode::kRead : OpenMode::kMmap;
  SQZ_ASSIGN_OR_RETURN(auto file, SqzFile::open(path, mode));
  SQZ_ASSIGN_OR_RETURN(fixture->served, make_served_index(std::move(file)));
  SQZ_RETURN_IF_ERROR(check_index(*fixture->served, options.selector));
  fixture->tokens = query_tokens;
  if (requests && query_tokens > 1) {
    fixture->indptr.resize(static_cast<size_t>(query_tokens) + 1);
    std::iota(fixture->indptr.begin(), fixture->indptr.end(), 0);
  }
  fixture->dtype = options.query_dtype == "f32"   ? DType::kF32
                   : options.query_dtype == "f16" ? DType::kF16
                                                  : DType::kBF16;
  if (is_random(options)) {
    fixture->exact_queries =
        random_queries(fixture->served->metadata().model, sets, query_tokens, options.seed);
  } else if (fixture->exact_queries.empty()) {
    fixture->exact_queries =
        synthetic_queries(fixture->layer(), fixture->served->metadata().model.group_size(), sets,
                          query_tokens, options.seed);
  }
  for (const auto& set : fixture->exact_queries) {
    fixture->queries.push_back(rounded(set, fixture->dtype));
  }
  return std::shared_ptr<const Fixture>(std::move(fixture));
}

JsonMembers shape_of(const Fixture& fixture, const Options& options) {
  const LayerView& view = fixture.layer();
  std::vector<int64_t> clusters;
  for (int k = 0; k < view.levels; ++k) clusters.push_back(view.level[k].clusters);
  return {{"tokens", fixture.served->metadata().tokens},
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
          {"rule", options.rule},
          {"open", options.open_mode}};
}

}  // namespace sqz::bench
