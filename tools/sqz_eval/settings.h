// The selector settings that one run compares: the cross product of the options, without what a
// selector does not have (dense has no budget, stream no levels).
#pragma once

#include <string>
#include <vector>

#include "libindex/builder.h"
#include "tools/common/layer_policy.h"
#include "tools/common/selector_options.h"

namespace sqz::eval {

// What a selector takes and what index serves it. A new selector is one line of kSelectors.
struct SelectorTraits {
  const char* name;
  const char* served;  // the selector of libruntime that it is
  const char* index;   // kind of index: one is built of each view for every kind in use
  bool budget = true, levels = false, rule = false;
  bool keys = false;                 // needs the calibration of single keys
  bool heavy = false;                // needs the order of heavy hitters
  bool rows = false, codes = false;  // takes rows of codes; chooses by key codes

  bool qmodel() const;  // serves from buckets, which a query classifier has
};

struct EvalBuildOptions : BuildOptions {
  // `qmodel` as buckets of keys after RoPE, see roped_qmodel(); borrowed. Null: there is none.
  const QmodelFile* roped = nullptr;
};

const SelectorTraits* find_selector(const std::string& name);
std::vector<std::string> known_selectors();

// What an index is: "kmeans", "pages", ... and, of clusters, its rows. One with rows of codes or
// key codes is compressed from the one without.
struct IndexKind {
  IndexKind(const char* of, RowKind kind_of_rows = RowKind::k16, int code_bits = 0)
      : partition(of), rows(kind_of_rows), key_codes(code_bits) {}

  std::string name() const;  // of its file: "kmeans", "kmeans-q8-2"
  IndexKind uncompressed() const { return partition.c_str(); }
  bool operator==(const IndexKind&) const = default;

  std::string partition;
  RowKind rows;
  int key_codes;
};

// How the index of a kind is built, on top of `base`, whose query classifiers are for those that
// need them.
BuildOptions index_options(const IndexKind& kind, const EvalBuildOptions& base);

// The buckets of keys after RoPE that a query classifier's file has, as buckets of a model without
// RoPE: what turns queries and keys back to where they were before it then turns nothing, and an
// index of these buckets has its keys, and looks at queries, as they are. Its networks mean
// nothing.
QmodelFile roped_qmodel(QmodelFile qmodel);

struct SettingOptions {
  std::vector<std::string> selectors = {"dense", "squeezed"};
  std::vector<double> budgets = {kDefaultBudget};
  std::vector<int> levels = {0};
  std::vector<std::string> rules = {"budget"};
  std::vector<std::string> rows = {"bf16"};
  std::vector<int> key_codes = {0};
  bool gpu = false;  // serves: it does not use key codes
  int64_t block = 0;
  std::optional<int> dense_layers;
  std::vector<std::string> layers = {kUniformLayers};  // profiles of layers to compare
};

struct Setting {
  const SelectorTraits* traits = nullptr;
  SelectorOptions options;
  RowKind rows = RowKind::k16;
  int key_codes = 0;
  bool approximates = false;  // keys that are not read, by key codes

  IndexKind index() const { return {traits->index, rows, key_codes}; }
  std::string coding() const;  // " q8, codes 2"; empty of 16-bit rows without codes
  bool dense() const { return options.selector == "dense"; }
  std::string text() const;  // "squeezed, budget 0.125, 2 levels, rule threshold, ..."
};

// Always begins with dense, the reference, once. kInvalidArgument for an unknown selector.
Result<std::vector<Setting>> make_settings(const SettingOptions& options);

// Whether one of the settings needs a query classifier.
bool needs_qmodel(const std::vector<Setting>& settings);
// ... its buckets of keys after RoPE.
bool needs_roped(const std::vector<Setting>& settings);

// Whether one of the settings needs the calibration of single keys.
bool needs_keys(const std::vector<Setting>& settings);
// ... the order of heavy hitters.
bool needs_heavy(const std::vector<Setting>& settings);

// The kinds of index that the settings need, without repetition.
std::vector<IndexKind> index_kinds(const std::vector<Setting>& settings);

}  // namespace sqz::eval
