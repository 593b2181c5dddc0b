// The numbers of sqz-eval against values computed by hand, its settings and its table.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "libruntime/rope.h"
#include "tests/common/json.h"
#include "tests/common/tiny_qmodel.h"
#include "tools/sqz_eval/metrics.h"
#include "tools/sqz_eval/settings.h"
#include "tools/sqz_eval/table.h"

namespace sqz::eval {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr float kNothing = -std::numeric_limits<float>::infinity();

Samples samples(std::initializer_list<double> values) {
  Samples out;
  for (const double value : values) out.add(value);
  return out;
}

TEST(EvalMetrics, MeanAndStandardError) {
  const Samples four = samples({1, 2, 3, 6});
  EXPECT_DOUBLE_EQ(four.mean(), 3);
  // Squares 4 + 1 + 0 + 9 = 14, / 3, / 4.
  EXPECT_DOUBLE_EQ(four.standard_error(), std::sqrt(14.0 / 12));
  EXPECT_EQ(samples({5}).standard_error(), 0);
  EXPECT_EQ(Samples().mean(), 0);
  EXPECT_DOUBLE_EQ(binomial_error(0.75, 48), 0.0625);
  EXPECT_THAT(difference(four, samples({1, 1, 1, 1})).values(), ElementsAre(0, 1, 2, 5));
  EXPECT_EQ(count_both(samples({1, 0, 1, 0}), samples({1, 1, 0, 0})), 1);
}

TEST(EvalMetrics, BlockMeans) {
  const std::vector<double> values = {1, 3, 5, 9, 100};
  EXPECT_THAT(block_means(values, 2), ElementsAre(2, 7));
  EXPECT_THAT(block_means(values, 5), ElementsAre(23.6));
  EXPECT_THAT(block_means(values, 6), ElementsAre(23.6));
  EXPECT_TRUE(block_means({}, 2).empty());
}

TEST(EvalMetrics, RelativeError) {
  const std::vector<float> dense = {3, 4}, sparse = {3, 3}, zero = {0, 0};
  EXPECT_DOUBLE_EQ(relative_error(sparse, dense), 0.2);
  EXPECT_EQ(relative_error(dense, dense), 0);
  EXPECT_EQ(relative_error(zero, zero), 0);
  EXPECT_TRUE(std::isinf(relative_error(dense, zero)));
}

TEST(EvalMetrics, MergedStatesAreOneSoftmax) {
  // Keys with logits log 1 and log 3 and values 4 and 8: 1/4 * 4 + 3/4 * 8 = 7.
  const std::vector<float> a = {4}, b = {8};
  std::vector<float> out(1);
  merge_out(a, 0, b, std::log(3.0f), out);
  EXPECT_NEAR(out[0], 7, 1e-6);
  merge_out(a, kNothing, b, 500, out);
  EXPECT_EQ(out[0], 8);
  merge_out(a, kNothing, b, kNothing, out);
  EXPECT_EQ(out[0], 0);
}

TEST(EvalMetrics, RecalledMass) {
  EXPECT_NEAR(recalled_mass(std::log(3.0f), std::log(4.0f)), 0.75, 1e-6);
  EXPECT_EQ(recalled_mass(kNothing, 1), 0);
  EXPECT_EQ(recalled_mass(kNothing, kNothing), 1);
}

TEST(EvalMetrics, ReadsAddUp) {
  Reads reads;
  EXPECT_EQ(reads.delivered_budget(), 0);
  sqz_stats stats = {};
  stats.asked_budget = 0.125;
  stats.bytes_read = 10;
  stats.bytes_dense = 40;
  stats.keys_read = 1;
  stats.keys_possible = 10;
  reads.add(stats);
  stats.bytes_read = 30;
  stats.dense_fallback = 1;
  reads.add(stats);
  EXPECT_DOUBLE_EQ(reads.delivered_budget(), 0.5);
  EXPECT_DOUBLE_EQ(reads.lowest, 0.25);
  EXPECT_DOUBLE_EQ(reads.highest, 0.75);
  EXPECT_DOUBLE_EQ(reads.delivered_keep(), 0.1);
  EXPECT_EQ(reads.asked_budget, 0.125);
  EXPECT_TRUE(reads.dense_fallback);
}

TEST(EvalSettings, CrossProductWithDenseFirstAndOnce) {
  SettingOptions options;
  options.selectors = {"squeezed", "dense", "squeezed"};
  options.budgets = {0.1, 0.2};
  options.levels = {1, 2};
  options.rules = {"threshold", "budget"};
  const auto settings = make_settings(options);
  ASSERT_TRUE(settings.ok());
  ASSERT_EQ(settings->size(), 9u);
  EXPECT_TRUE(settings->front().dense());
  for (size_t i = 1; i < 9; ++i) EXPECT_EQ(settings->at(i).options.selector, "squeezed");
  EXPECT_EQ(settings->at(8).options.levels, 2);
  EXPECT_EQ(settings->at(8).options.rule, "budget");
  EXPECT_EQ(settings->at(8).options.budget, 0.2);
  EXPECT_EQ(index_kinds(*settings).size(), 1u);
}

TEST(EvalSettings, KeyCodesApproximateOnACpuAlone) {
  for (const bool gpu : {false, true}) {
    SettingOptions options;
    options.selectors = {"squeezed"};
    options.key_codes = {0, 2};
    options.gpu = gpu;
    const auto settings = make_settings(options);
    EXPECT_FALSE(settings->at(1).approximates);
    EXPECT_EQ(settings->at(2).approximates, !gpu);
  }
}

TEST(EvalSettings, UnknownSelectorIsRefused) {
  SettingOptions options;
  options.selectors = {"psychic"};
  const auto settings = make_settings(options);
  ASSERT_FALSE(settings.ok());
  EXPECT_THAT(settings.status().message(), HasSubstr("found psychic, expected one of dense"));
}

TEST(EvalSettings, SelectorsAreThoseOfLibruntime) {
  // Every selector of the library can be measured, and every one that is offered is served as
  // itself: an unknown name is refused, not served as another.
  std::vector<std::string> names = selector_names();
  names.erase(names.begin());  // "auto": each has its own index
  for (const std::string& name : names) {
    EXPECT_NE(find_selector(name), nullptr) << name;
    SelectorOptions options;
    options.selector = name;
    const auto session = session_options(options, 1);
    ASSERT_TRUE(session.ok()) << session.status().message();
    EXPECT_EQ(sqz_selector_name(static_cast<sqz_selector>(session->selector)), name);
    EXPECT_EQ(session->budget, name == "dense" ? 0 : kDefaultBudget);
  }
  SettingOptions all;
  all.selectors = names;
  const auto settings = make_settings(all);
  ASSERT_TRUE(settings.ok());
  EXPECT_EQ(settings->size(), names.size());
  SelectorOptions unknown;
  unknown.selector = "psychic";
  const auto refused = session_options(unknown, 1);
  ASSERT_FALSE(refused.ok());
  EXPECT_THAT(refused.status().message(), HasSubstr("found psychic, expected one of squeezed"));
}

TEST(EvalSettings, ProfilesOfLayersAreCompared) {
  SettingOptions options;
  options.selectors = {"dense", "stream", "h2o"};
  options.layers = {"uniform", "a/l.sqz"};
  const auto settings = make_settings(options);
  ASSERT_TRUE(settings.ok());
  std::vector<std::string> texts;
  for (const Setting& setting : *settings) texts.push_back(setting.text());
  EXPECT_THAT(texts,
              ElementsAre("dense", "stream, budget 0.125", "stream, budget 0.125, layers a/l.sqz",
                          "h2o, budget 0.125", "h2o, budget 0.125, layers a/l.sqz"));
  EXPECT_TRUE(needs_heavy(*settings));
  EXPECT_FALSE(needs_heavy({settings->at(1)}));
  SelectorOptions spread = settings->at(2).options;
  spread.layer_scales = {1, 2, 3};
  const auto session = session_options(spread, 1);
  ASSERT_TRUE(session.ok());
  EXPECT_EQ(session->layer_scales, spread.layer_scales.data());
  EXPECT_EQ(session->layer_scale_count, 3);
  EXPECT_EQ(session->uniform_layers, 0);
  EXPECT_EQ(session_options(settings->at(1).options, 1)->uniform_layers, 1);
  EXPECT_EQ(session_options(SelectorOptions(), 1)->uniform_layers, 0);
  spread.thresholds = {0.1};
  spread.budget.reset();
  EXPECT_THAT(session_options(spread, 1).status().message(), HasSubstr("--threshold is one for"));
}

TEST(EvalSettings, EachSelectorHasItsIndexAndItsOptions) {
  SettingOptions options;
  options.selectors = {"quest", "ideal", "stream"};
  options.rules = {"threshold", "budget"};
  options.levels = {1, 2};
  options.dense_layers = 0;
  const auto settings = make_settings(options);
  ASSERT_TRUE(settings.ok());
  std::vector<std::string> texts;
  for (const Setting& setting : *settings) texts.push_back(setting.text());
  EXPECT_THAT(texts, ElementsAre("dense", "quest, budget 0.125, dense layers 0",
                                 "ideal, budget 0.125, rule threshold, dense layers 0",
                                 "ideal, budget 0.125, rule budget, dense layers 0",
                                 "stream, budget 0.125, dense layers 0"));
  EXPECT_THAT(index_kinds(*settings), ElementsAre("kmeans", "pages"));
  EXPECT_TRUE(needs_keys(*settings));
  EvalBuildOptions base;
  base.calibrate_keys = base.heavy_hitters = true;
  EXPECT_EQ(index_options("pages", base).partition, Partition::kPages);
  EXPECT_FALSE(index_options("pages", base).calibrate_keys);
  EXPECT_FALSE(index_options("pages", base).heavy_hitters);
  EXPECT_TRUE(index_options("kmeans", base).heavy_hitters);
  EXPECT_EQ(index_options("kmeans", base).partition, Partition::kKmeans);
  EXPECT_TRUE(index_options("kmeans", base).calibrate_keys);
  EXPECT_FALSE(needs_qmodel(*settings));
  const QmodelFile qmodel;
  base.qmodel = &qmodel;
  EXPECT_EQ(index_options("kmeans", base).qmodel, nullptr);
  EXPECT_EQ(index_options("buckets", base).qmodel, &qmodel);
  EXPECT_EQ(index_options("buckets", base).partition, Partition::kBuckets);
  EXPECT_FALSE(index_options("buckets", base).heavy_hitters);
  const QmodelFile roped;
  base.roped = &roped;
  EXPECT_EQ(index_options("roped-buckets", base).qmodel, &roped);
  EXPECT_EQ(index_options("roped-buckets", base).partition, Partition::kBuckets);
  options.selectors = {"saap"};
  EXPECT_TRUE(needs_qmodel(*make_settings(options)));
  EXPECT_FALSE(needs_roped(*make_settings(options)));
  EXPECT_THAT(index_kinds(*make_settings(options)), ElementsAre("kmeans", "buckets"));
  const auto plain = session_options(settings->at(1).options, 1);
  EXPECT_EQ(plain->dense_layers, -1);
}

TEST(EvalSettings, BucketsAfterRopeAreThoseOfAModelThatTurnsNothing) {
  const QmodelFile q = testing::tiny_qmodel({.head_dim = 8, .roped_centroids = true});
  const QmodelFile roped = roped_qmodel(q);
  EXPECT_EQ(roped.layers[1].centroids, q.layers[1].roped_centroids);
  EXPECT_NE(roped.layers[1].centroids, q.layers[1].centroids);
  EXPECT_FALSE(roped.has_roped_centroids);
  const std::vector<float> row = {1, -2, 3, -4, 0.5, 6, -7, 8};
  std::vector<float> angles(8), before(8), as_it_is(8);
  RopeUndo(q.model.rope, 8).apply(32767, row.data(), 1, angles.data(), before.data());
  RopeUndo(roped.model.rope, 8).apply(32767, row.data(), 1, angles.data(), as_it_is.data());
  EXPECT_NE(before, row);
  EXPECT_EQ(as_it_is, row);
}

TEST(EvalTable, RowsAsJsonAndAsText) {
  SettingOptions options;
  options.selectors = {"squeezed"};
  Row row;
  row.tokens = 8000;
  row.task = "error";
  row.on = "text";
  row.setting = make_settings(options)->at(1);
  row.trials = 48;
  row.value = {0.25, 0.0625};
  row.difference = Estimate{-0.5, 0.125};
  row.agreement = Agreement{40, 39};
  row.reads.bytes_read = 1;
  row.reads.bytes_dense = 8;
  const Json json = json_of(row_json(row));
  EXPECT_EQ(json["task"], "error");
  EXPECT_EQ(json["on"], "text");
  EXPECT_EQ(json["selector"], "squeezed");
  EXPECT_EQ(json["layers"], "uniform");
  EXPECT_EQ(json["value"], 0.25);
  EXPECT_EQ(json["stderr"], 0.0625);
  EXPECT_EQ(json["difference"]["value"], -0.5);
  EXPECT_EQ(json["agreement"], (Json{{"dense", 40}, {"both", 39}}));
  EXPECT_EQ(json["budget"]["delivered"], 0.125);
  const std::string table = table_text({row});
  EXPECT_THAT(table, HasSubstr("0.2500 +- 0.0625"));
  EXPECT_THAT(table, HasSubstr("error text"));
  EXPECT_THAT(table, HasSubstr(" 39/40 "));
  EXPECT_EQ(table.find('\n'), table.size() / 2 - 1) << "columns are not aligned\n" << table;

  row.skipped = "the budget cannot be met";
  EXPECT_EQ(row_json(row)["skipped"], "the budget cannot be met");
  EXPECT_FALSE(row_json(row).contains("value"));
  EXPECT_THAT(table_text({row}), HasSubstr("skipped"));
}

}  // namespace
}  // namespace sqz::eval
