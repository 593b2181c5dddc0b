// sqz-index report: a page of every kind of file.
#include <gmock/gmock.h>

#include <map>

#include "tests/common/tiny_buckets.h"
#include "tests/common/tiny_index.h"
#include "tests/common/tiny_layers.h"
#include "tests/common/tiny_qmodel.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/tools/run_tool.h"
#include "tests/tools/xml.h"

namespace sqz {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::read_xml;
using testing::XmlElement;

const std::string kTool = "sqz-index";

class ReportTool : public ToolTest {
 protected:
  // The page of these files, which must be one.
  XmlElement report(const std::vector<std::string>& inputs, int64_t figures) {
    std::vector<std::string> arguments = {"report", "-o", path("r.html"), "--force", "--json"};
    arguments.insert(arguments.end(), inputs.begin(), inputs.end());
    const ToolRun made = run(kTool, arguments);
    EXPECT_EQ(made.code, 0) << made.err;
    result_ = made.last();
    const std::string text = read_all(path("r.html"));
    EXPECT_EQ(result_["bytes"], text.size());
    EXPECT_EQ(result_["figures"], figures);
    XmlElement html = read_xml(text);
    EXPECT_EQ(html.all("svg").size(), static_cast<size_t>(figures));
    return html;
  }
  void refused(std::vector<std::string> inputs, int code, const std::string& says) {
    const std::string before = files();
    inputs.insert(inputs.begin(), {"report", "-o", path("bad.html")});
    const ToolRun result = run(kTool, inputs);
    EXPECT_EQ(result.code, code) << result.err;
    EXPECT_THAT(result.err, HasSubstr(says));
    EXPECT_EQ(files(), before) << "nothing half-written";
  }
  static std::vector<std::string> texts(const XmlElement& html, const char* tag) {
    std::vector<std::string> out;
    for (const XmlElement* element : html.all(tag)) out.push_back(element->text);
    return out;
  }
  // The value beside a name of the first table.
  static std::string value_of(const XmlElement& html, const std::string& name) {
    for (const XmlElement* row : html.all("tr")) {
      if (row->children.at(0).text == name) return row->children.at(1).text;
    }
    return "nothing beside " + name;
  }
  // The lines of a table whose first column has this title.
  static std::vector<std::vector<std::string>> table(const XmlElement& html,
                                                     const std::string& first) {
    std::vector<std::vector<std::string>> out;
    for (const XmlElement* element : html.all("table")) {
      const auto rows = element->all("tr");
      if (rows.empty() || rows[0]->children[0].text != first) continue;
      for (size_t i = 1; i < rows.size(); ++i) {
        out.emplace_back();
        for (const XmlElement& cell : rows[i]->children) out.back().push_back(cell.text);
      }
    }
    return out;
  }

  Json result_;
};

TEST_F(ReportTool, AnIndex) {
  testing::TinyIndexOptions o;
  o.layers = 3;
  o.dense_layers = {0};
  o.tokens = 200;
  o.layer_budgets = {30, 10, 20};
  const auto index = testing::write_tiny_index(path("x.sqz"), o);
  ASSERT_TRUE(index.ok());
  // One head that keeps more of its keys than the others, of prompts only.
  auto raw = testing::RawIndex::read(path("x.sqz"));
  const size_t prompt_layer_1_head_1 = (3 * 2 + 1 * 2 + 1) * 1025;
  raw.set<float>("calibration.shares", prompt_layer_1_head_1 + 102, 0.1005F);
  raw.fix_checksums();
  write_all(path("x.sqz"), raw.bytes());
  // Sizes of clusters, thresholds, shares by head, budgets.
  const XmlElement html = report({path("x.sqz")}, 4);
  EXPECT_EQ(result_["inputs"], (Json{{{"path", path("x.sqz")}, {"kind", "index"}}}));
  EXPECT_THAT(texts(html, "h2"), ElementsAre("Index " + path("x.sqz")));
  EXPECT_THAT(texts(html, "h3"), ElementsAre("Sizes of clusters", "Calibration", "Layer budgets"));
  EXPECT_EQ(value_of(html, "clusters"), "3, 9 a KV head, coarse to fine");

  // Counted from what was written, without the offsets' reader.
  const auto lines = table(html, "layer");
  ASSERT_EQ(lines.size(), 4u) << "two levels of two layers";
  for (const auto& line : lines) {
    const auto layer = static_cast<size_t>(std::stoi(line[0]));
    const auto level = static_cast<size_t>(std::stoi(line[1])) - 1;
    std::vector<uint32_t> sizes;
    for (int64_t head = 0; head < 2; ++head) {
      const auto first = testing::tiny::first_slots(index->layers[layer], head, level);
      for (size_t i = 0; i + 1 < first.size(); ++i) sizes.push_back(first[i + 1] - first[i]);
    }
    std::sort(sizes.begin(), sizes.end());
    EXPECT_EQ(line[2], concat(sizes.size()));
    EXPECT_EQ(line[3], concat(sizes.front()));
    EXPECT_EQ(line[4], concat(sizes[sizes.size() / 2]));
    EXPECT_EQ(std::stod(line[5]), std::round(10.0 * 384 / static_cast<double>(sizes.size())) / 10);
    EXPECT_EQ(line[6], concat(sizes.back()));
    const size_t tenth = sizes.size() == 6 ? 1 : 2;  // of 18
    double largest = 0;
    for (size_t i = 0; i < tenth; ++i) largest += sizes[sizes.size() - 1 - i];
    EXPECT_NEAR(std::stod(line[7]), 100 * largest / (2 * 192), 0.051);
  }
  // A row of the map is a layer, a column a range of sizes.
  const auto maps = html.all("svg");
  std::map<std::string, int> counted;
  for (const size_t layer : {1u, 2u}) {
    for (int64_t head = 0; head < 2; ++head) {
      const auto first = testing::tiny::first_slots(index->layers[layer], head, 1);
      for (size_t i = 0; i + 1 < first.size(); ++i) {
        const uint32_t size = first[i + 1] - first[i];
        uint32_t most = 1;
        while (most < size) most *= 2;
        ++counted[concat("layer ", layer, ", ", most > 2 ? "≤ " : "", most)];
      }
    }
  }
  std::vector<std::string> cells, expected;
  for (const XmlElement* cell : maps[0]->all("rect")) cells.push_back(cell->children.at(0).text);
  for (const auto& [name, count] : counted) expected.push_back(concat(name, ": ", count / 18.0));
  EXPECT_THAT(cells, ::testing::UnorderedElementsAreArray(expected));

  // The calibration is made up: curve i is 1 - 20 i / 1024, and heads keep what is asked.
  const auto shares = table(html, "scope");
  ASSERT_EQ(shares.size(), 12u);
  EXPECT_THAT(shares[3], ElementsAre("generation", "0.10", "0.0996", "0.0996", "0.0996", "-0.992"));
  EXPECT_THAT(shares[9], ElementsAre("prompt", "0.10", "0.0998", "0.0996", "0.1005", "-0.992"));
  EXPECT_EQ(maps[2]->all("circle").size(), 2u * 2 * 2) << "scopes, sparse layers, heads";
  const auto bars = maps[3]->all("rect");
  ASSERT_EQ(bars.size(), 4u);
  EXPECT_EQ(bars[0]->children.at(0).text, "budget: 0, 30");
  EXPECT_NEAR(bars[0]->number("height"), 3 * bars[1]->number("height"), 0.05);
}

TEST_F(ReportTool, IndexesOfOtherPartitions) {
  testing::TinyIndexOptions o;
  o.page_size = 8;
  ASSERT_TRUE(testing::write_tiny_index(path("pages.sqz"), o).ok());
  report({path("pages.sqz")}, 0);
  o = {};
  o.tokens = 300;
  o.heavy_hitters = true;
  ASSERT_TRUE(testing::write_tiny_index(path("x.sqz"), o).ok());
  ASSERT_EQ(run(kTool, {"prune", path("x.sqz"), "--selector", "h2o", "--budget", "0.2", "-o",
                        path("pruned.sqz")})
                .code,
            0);
  const XmlElement html = report({path("pruned.sqz")}, 1);
  EXPECT_THAT(texts(html, "h3"), ElementsAre("What is left"));
  EXPECT_EQ(html.all("svg")[0]->all("rect")[0]->children.at(0).text,
            "clustered keys that are left: 0, 52");
  testing::TinyIndexOptions dense;
  dense.dense_layers = {0, 1};
  ASSERT_TRUE(testing::write_tiny_index(path("dense.sqz"), dense).ok());
  report({path("dense.sqz")}, 0);
}

TEST_F(ReportTool, AnIndexOfBuckets) {
  const QmodelFile qmodel = testing::tiny_qmodel();  // layer 0 dense, two heads of three buckets
  ASSERT_TRUE(testing::write_tiny_buckets(path("b.sqz"), qmodel, 300).ok());
  const XmlElement html = report({path("b.sqz")}, 1);
  const auto lines = table(html, "layer");
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(std::vector(lines[0].begin(), lines[0].begin() + 4),
              ElementsAre("1", "buckets", "6", "0"));
  EXPECT_EQ(lines[0][5], "66.7") << "of 200 keys a head, mean";
  EXPECT_EQ(html.all("svg")[0]->all("rect")[0]->children.at(0).text, "layer 1, 0: 0.333333")
      << "one of three is empty";
}

TEST_F(ReportTool, ALayerProfile) {
  LayersFile layers = testing::four_layers();
  std::vector<JsonText> sweep;
  for (const auto& [name, p, loss] :
       {std::tuple{"uniform", 1.0, 3.5}, {"groups", 0.5, 3.25}, {"measured", 1.0, 3.125}}) {
    sweep.push_back({{"allocation", name},
                     {"p", p},
                     {"strength", 1},
                     {"loss", loss},
                     {"gain", 3.5 - loss},
                     {"gain_stderr", 0.01},
                     {"delivered", 0.1}});
  }
  layers.measured = {{"selector", "stream"},
                     {"rule", "threshold"},
                     {"budget", 0.1},
                     {"dense_loss", 3.0},
                     {"sweep", sweep}};
  ASSERT_TRUE(write_layers_file(Env::posix(), path("l.sqz"), false, layers).ok());
  const XmlElement html = report({path("l.sqz")}, 4);
  EXPECT_EQ(result_["inputs"][0]["kind"], "layers");
  EXPECT_THAT(texts(html, "h2"),
              ElementsAre("Layer profile " + path("l.sqz"), "What layer budgets cost"));
  const auto svgs = html.all("svg");
  // Cosines: a dot a layer, in its group's colour, with its error.
  EXPECT_EQ(svgs[0]->all("circle").size(), 4u);
  EXPECT_EQ(svgs[0]->all("circle")[0]->children.at(0).text, "group 0: 0, 0.4 ± 0.01");
  EXPECT_EQ(svgs[0]->all("circle")[3]->children.at(0).text, "group 2: 3, 0.9625 ± 0.333333");
  EXPECT_EQ(svgs[1]->all("rect").size(), 5u) << "four bars and the legend's";
  EXPECT_THAT(table(html, "layer").at(2), ElementsAre("2", "0.8750", "0.0020", "1", "170"));
  // Loss above dense against budget, a line each; against p: uniform is p = 1.
  EXPECT_EQ(svgs[2]->all("circle").size(), 3u);
  EXPECT_EQ(svgs[2]->all("circle")[1]->children.at(0).text, "groups, p = 0.5: 0.1, 0.25");
  const auto by_p = svgs[3]->all("circle");
  ASSERT_EQ(by_p.size(), 2u);
  EXPECT_EQ(by_p[0]->children.at(0).text, "budget 0.1: 0.5, 0.25");
  EXPECT_EQ(by_p[1]->children.at(0).text, "budget 0.1: 1, 0.5");
}

TEST_F(ReportTool, AQueryClassifierAndItsTraining) {
  ASSERT_TRUE(write_qmodel_file(Env::posix(), path("q.sqz"), false, testing::tiny_qmodel()).ok());
  Json training = {{"event", "result"}, {"scores", Json::array()}};
  for (const char* method : {"classifier", "kmeans", "kmeans-rope"}) {
    for (const char* queries : {"all", "far"}) {
      training["scores"].push_back({{"method", method},
                                    {"queries", queries},
                                    {"keys", "far"},
                                    {"recall", {{"0.05", 0.1}, {"0.1", 0.2}, {"0.2", 0.4}}}});
    }
  }
  write_all(path("t.jsonl"), training.dump() + "\n");
  const XmlElement html = report({path("q.sqz"), path("t.jsonl")}, 3);
  EXPECT_EQ(result_["inputs"][0]["kind"], "qmodel");
  EXPECT_EQ(result_["inputs"][1]["kind"], "results");
  const auto svgs = html.all("svg");
  EXPECT_EQ(svgs[0]->all("circle")[1]->children.at(0).text, "classifier: 0.2, 0.5");
  EXPECT_EQ(svgs[1]->all("polyline").size(), 3u) << "a line a method";
  EXPECT_EQ(svgs[2]->all("circle").size(), 9u);
}

TEST_F(ReportTool, RowsOfEvalFromSeveralFiles) {
  const auto row = [](const char* task, const char* selector, double asked, double delivered,
                      double value) {
    return Json{{"task", task},
                {"tokens", 4000},
                {"selector", selector},
                {"trials", 8},
                {"value", value},
                {"stderr", 0.25},
                {"budget", {{"asked", asked}, {"delivered", delivered}}},
                {"keep", {{"asked", asked}, {"delivered", delivered / 2}}}};
  };
  const auto write = [&](const std::string& name, const Json& rows) {
    write_all(path(name), Json{{"event", "result"}, {"rows", rows}}.dump() + "\n");
  };
  Json skipped = row("loss", "stream", 0.001, 0, 0);
  skipped["skipped"] = "<b>too small</b>";
  write("a.jsonl", {row("loss", "dense", 1, 1, 3), row("loss", "stream", 0.2, 0.2, 3.5), skipped});
  write("b.jsonl", {row("loss", "stream", 0.1, 0.1, 4), row("recall", "squeezed", 0.1, 0.2, 0.5)});
  // Loss, recall, and recall's delivered budgets, which are not those asked for.
  const XmlElement html = report({path("a.jsonl"), path("b.jsonl")}, 3);
  const auto svgs = html.all("svg");
  ASSERT_EQ(svgs[0]->all("polyline").size(), 1u) << "one setting, from both files";
  const auto points = svgs[0]->all("circle");
  ASSERT_EQ(points.size(), 2u);
  EXPECT_EQ(points[0]->children.at(0).text, "stream: 0.1, 4 ± 0.25");
  EXPECT_EQ(points[1]->children.at(0).text, "stream: 0.2, 3.5 ± 0.25");
  EXPECT_EQ(svgs[1]->all("circle")[0]->children.at(0).text, "squeezed: 0.1, 0.5 ± 0.25")
      << "recall is shown by the keys that were read";
  EXPECT_EQ(svgs[2]->all("circle")[0]->children.at(0).text, "squeezed: 0.1, 0.2");
  const auto lines = table(html, "setting");
  ASSERT_EQ(lines.size(), 5u);
  EXPECT_EQ(lines[2][0], "stream (skipped: <b>too small</b>)");
}

TEST_F(ReportTool, NeedlesAsAFigureAlone) {
  const auto row = [](const char* task, const char* on, int tokens, const char* selector,
                      const char* budget, const char* value) {
    return concat(R"({"event":"row","task":")", task, R"(","on":")", on, R"(","tokens":)", tokens,
                  R"(,"selector":")", selector, R"(","trials":8,"value":)", value,
                  R"(,"stderr":0.125,"budget":{"asked":)", budget, R"(,"delivered":)", budget,
                  R"(},"keep":{"asked":)", budget, R"(,"delivered":)", budget, "}}\n");
  };
  std::string rows = row("needle1", "", 4000, "dense", "1", "0.9") +
                     row("needle1", "", 4000, "squeezed", "0.1", "0.75") +
                     row("needle1", "", 4000, "squeezed", "0.2", "0.875") +
                     row("needle1", "", 2000, "squeezed", "0.2", "0.5") +
                     row("loss", "", 4000, "squeezed", "0.2", "3");
  write_all(path("a.jsonl"), rows);
  refused({path("a.jsonl"), "--figure", "needles"}, 2, "no rows of one of the tasks needle1 and");
  refused({path("a.jsonl"), "--figure", "cakes"}, 2, "--figure");
  rows += row("error", "text", 4000, "squeezed", "0.1", "0.25") +
          row("error", "questions", 4000, "squeezed", "0.1", "0.375");
  write_all(path("a.jsonl"), rows);
  const ToolRun made =
      run(kTool, {"report", path("a.jsonl"), "--figure", "needles", "-o", path("n.svg"), "--json"});
  ASSERT_EQ(made.code, 0) << made.err;
  EXPECT_EQ(made.last()["figures"], 1);
  const XmlElement svg = read_xml(read_all(path("n.svg")));
  EXPECT_EQ(svg.name, "svg");
  EXPECT_THAT(texts(svg, "style").at(0), HasSubstr("prefers-color-scheme: dark"));
  const auto circles = svg.all("circle");
  ASSERT_EQ(circles.size(), 3u) << "of the longest context, of questions";
  EXPECT_EQ(circles[0]->children.at(0).text, "squeezed: 0.1, 0.75 ± 0.125");
  EXPECT_EQ(circles[2]->children.at(0).text, "squeezed: 0.1, 0.375 ± 0.125");
  const auto labels = texts(svg, "text");
  for (const char* label : {"One needle, 4000 tokens", "dense: 0.9",
                            "Error of the attention output on questions, 4000 tokens"}) {
    EXPECT_NE(std::find(labels.begin(), labels.end(), label), labels.end()) << label;
  }
}

TEST_F(ReportTool, LossesAreShownAboveDense) {
  Json row = {{"task", "loss"},
              {"tokens", 4000},
              {"selector", "dense"},
              {"trials", 8},
              {"value", 3},
              {"stderr", 0.25},
              {"budget", {{"asked", 1}, {"delivered", 1}}},
              {"keep", {{"asked", 1}, {"delivered", 1}}}};
  Json rows = Json::array({row});
  row["selector"] = "stream";
  row["value"] = 3.5;
  row["difference"] = {{"value", 0.5}, {"stderr", 0.125}};
  rows.push_back(row);
  write_all(path("a.jsonl"), Json{{"event", "result"}, {"rows", rows}}.dump() + "\n");
  const XmlElement html = report({path("a.jsonl")}, 1);
  EXPECT_EQ(html.all("circle").at(0)->children.at(0).text, "stream: 1, 0.5 ± 0.125");
  EXPECT_EQ(table(html, "setting").at(1).at(4), "3.5000");
}

TEST_F(ReportTool, HostileNamesStayText) {
  testing::TinyIndexOptions o;
  ASSERT_TRUE(testing::write_tiny_index(path("<i>&\".sqz"), o).ok());
  auto raw = testing::RawIndex::read(path("<i>&\".sqz"));
  raw.metadata["build"] = R"({"note":"</td><script>x()</script>"})";
  raw.fix_checksums();
  write_all(path("<i>&\".sqz"), raw.bytes());
  const XmlElement html = report({path("<i>&\".sqz")}, 3);
  EXPECT_EQ(html.all("script").size(), 0u);
  EXPECT_EQ(html.all("i").size(), 0u);
  EXPECT_EQ(html.all("h2")[0]->text, "Index " + path("<i>&\".sqz"));
  EXPECT_EQ(value_of(html, "build.note"), "</td><script>x()</script>");
}

TEST_F(ReportTool, TheSameFilesGiveTheSamePage) {
  ASSERT_TRUE(testing::write_tiny_index(path("x.sqz"), {}).ok());
  report({path("x.sqz")}, 3);
  const std::string first = read_all(path("r.html"));
  report({path("x.sqz"), "--threads", "1"}, 3);
  EXPECT_TRUE(read_all(path("r.html")) == first);
  EXPECT_EQ(files(), "r.html\nx.sqz\n");
}

TEST_F(ReportTool, BadInputIsRefused) {
  ASSERT_TRUE(testing::write_tiny_index(path("x.sqz"), {}).ok());
  refused({path("none.sqz")}, 3, "none.sqz");
  refused({path("x.sqz"), path("none.jsonl")}, 3, "none.jsonl");
  write_all(path("text"), "not a file of sqz");
  refused({path("text")}, 3, "text");
  write_all(path("r.jsonl"), "{\"event\": \"result\"}\n");
  refused({path("r.jsonl")}, 3, "r.jsonl: lines: found 1, and no result in them");
  write_all(path("r.jsonl"), "{\"event\": \"row\"}\n");
  refused({path("r.jsonl")}, 3, "r.jsonl: line 1: task: found nothing");
  std::filesystem::create_directory(path("empty"));
  refused({path("empty")}, 3, "expected indexes (.sqz) or status files (.jsonl) of a corpus");
  refused({}, 2, "FILE");
  // Offsets that are none, behind a header that is right.
  auto raw = testing::RawIndex::read(path("x.sqz"));
  raw.set<uint32_t>("layers.1.level.2.offsets", 3, 4000000000u);
  raw.fix_checksums();
  write_all(path("bad.sqz"), raw.bytes());
  refused({path("bad.sqz")}, 3, "layers.1.level.2.offsets[0][3]: found 4000000000");

  write_all(path("there.html"), "mine");
  const ToolRun kept = run(kTool, {"report", path("x.sqz"), "-o", path("there.html")});
  EXPECT_EQ(kept.code, 1);
  EXPECT_THAT(kept.err, HasSubstr("--force"));
  EXPECT_EQ(read_all(path("there.html")), "mine");
}

}  // namespace
}  // namespace sqz
