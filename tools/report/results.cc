#include "tools/report/results.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <sstream>

#include "formats/json_fields.h"
#include "tools/report/eval_rows.h"

namespace sqz {
namespace {

constexpr uint64_t kMostBytes = uint64_t{1} << 28;

// An array of numbers in [low, high], `count` of them (0: any number, but one).
template <class T>
std::vector<T> numbers(JsonFields& fields, const char* key, size_t count, double low, double high) {
  std::vector<T> out;
  const JsonValue* list = fields.value(key);
  if (list == nullptr) return out;
  const bool sized = list->is_array() && (count == 0 ? list->size() > 0 : list->size() == count);
  if (!sized) {
    fields.complain(key, count == 0 ? "an array" : concat("an array of ", count, ", one a layer"));
    return out;
  }
  for (const JsonValue& value : list->items()) {
    const double number = value.is_number() ? value.number() : low - 1;
    if (!(low <= number && number <= high)) {
      fields.complain_of(key, found_text(value), concat("numbers in [", low, ", ", high, "]"));
      return out;
    }
    out.push_back(static_cast<T>(number));
  }
  return out;
}

Result<LayersFile> layers_of(const JsonValue& result, const std::string& label) {
  constexpr int64_t kMost = UINT32_MAX;
  JsonFields fields(result, label);
  LayersFile out;
  out.producer = fields.text("producer");
  out.tokenizer_hash = fields.text("tokenizer_hash");
  out.texts = fields.integer("texts", 0, kMost);
  out.windows = fields.integer("windows", 0, kMost);
  out.window = fields.integer("window", 0, kMost);
  out.tokens = fields.integer("tokens", 0, kMost);
  out.allocation = fields.text("allocation");
  out.context = fields.integer("context", 1, kMost);
  out.uniform_budget = fields.integer("uniform_budget", 1, kMost);
  out.p = fields.number("p", 0, 1);
  out.cosine = numbers<double>(fields, "cosine", 0, -1, 1);
  const size_t layers = std::max<size_t>(out.cosine.size(), 1);
  out.cosine_error = numbers<double>(fields, "cosine_error", layers, 0, kMostPlotted);
  out.group = numbers<int32_t>(fields, "group", layers, 0, 2);
  out.budget = numbers<int64_t>(fields, "budget", layers, 0, static_cast<double>(kMost));
  SQZ_RETURN_IF_ERROR(fields.status());
  return out;
}

Result<MethodRecall> method_of(const JsonValue& score, const std::string& label) {
  JsonFields fields(score, label);
  MethodRecall out;
  out.method = fields.text("method");
  out.far_queries = fields.text("queries") == "far";
  out.keys = fields.text("keys");
  const JsonValue* recall = fields.value("recall");
  if (recall != nullptr && !recall->is_object()) {
    fields.complain("recall", "an object");
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  for (const JsonValue& value : recall->items()) {
    const std::string_view name = value.key();
    QmodelRecall row;
    const auto [end, error] =
        std::from_chars(name.data(), name.data() + name.size(), row.selectivity);
    const bool read = error == std::errc() && end == name.data() + name.size() &&
                      row.selectivity > 0 && row.selectivity <= 1 && value.is_number();
    if (!read) fields.complain_of("recall", JsonText(name).str(), "numbers by selectivity");
    if (read) row.recall = value.number();
    out.recall.push_back(row);
  }
  SQZ_RETURN_IF_ERROR(fields.status());
  std::sort(out.recall.begin(), out.recall.end(), [](const QmodelRecall& a, const QmodelRecall& b) {
    return a.selectivity < b.selectivity;
  });
  return out;
}

class Reader {
 public:
  // One line of a file.
  Status add(const JsonValue& event, const std::string& label) {
    JsonFields fields(event, label);
    const std::string kind = fields.text("event");
    SQZ_RETURN_IF_ERROR(fields.status());
    if (kind == "row") return add_row(event, label, out_.rows);
    if (kind == "pass") return read_rows(event, label, pass_);
    if (kind == "check") return add_check(event, label);
    if (kind != "result") return {};
    if (fields.has("rows")) {
      pass_.clear();
      return read_rows(event, label, out_.rows);
    }
    if (fields.has("cosine")) return add_profile(event, label);
    if (fields.has("scores")) return add_scores(event, label);
    return {};
  }

  // Everything that was read; of the context length that was not finished, the last pass.
  ToolResults take() {
    const bool finished = std::any_of(out_.rows.begin(), out_.rows.end(), [&](const EvalRow& row) {
      return !pass_.empty() && row.tokens == pass_.front().tokens;
    });
    if (!finished) out_.rows.insert(out_.rows.end(), pass_.begin(), pass_.end());
    return std::move(out_);
  }

 private:
  static Status add_row(const JsonValue& row, const std::string& label,
                        std::vector<EvalRow>& rows) {
    SQZ_ASSIGN_OR_RETURN(EvalRow own, eval_row(row, label));
    rows.push_back(std::move(own));
    return {};
  }

  static Status read_rows(const JsonValue& event, const std::string& label,
                          std::vector<EvalRow>& rows) {
    JsonFields fields(event, label);
    const JsonValue* list = fields.array("rows");
    SQZ_RETURN_IF_ERROR(fields.status());
    rows.clear();
    for (size_t i = 0; i < list->size(); ++i) {
      SQZ_RETURN_IF_ERROR(add_row((*list)[i], concat(label, ": rows[", i, "]"), rows));
    }
    return {};
  }

  Status add_check(const JsonValue& event, const std::string& label) {
    JsonFields fields(event, label);
    const PlotPoint point{static_cast<double>(fields.integer("step", 0, INT64_MAX)),
                          fields.number("loss", -kMostPlotted, kMostPlotted), 0};
    SQZ_RETURN_IF_ERROR(fields.status());
    training().checks.push_back(point);
    return {};
  }

  Status add_profile(const JsonValue& event, const std::string& label) {
    SQZ_ASSIGN_OR_RETURN(out_.layers, layers_of(event, label));
    const JsonValue* measured = event.find("measured");
    if (measured == nullptr) return {};
    SQZ_ASSIGN_OR_RETURN(out_.measured, measured_allocations(*measured, label + ": measured"));
    return {};
  }

  Status add_scores(const JsonValue& event, const std::string& label) {
    JsonFields fields(event, label);
    const JsonValue* scores = fields.array("scores");
    SQZ_RETURN_IF_ERROR(fields.status());
    for (size_t i = 0; i < scores->size(); ++i) {
      SQZ_ASSIGN_OR_RETURN(MethodRecall method,
                           method_of((*scores)[i], concat(label, ": scores[", i, "]")));
      training().scores.push_back(std::move(method));
    }
    return {};
  }

  TrainingResult& training() {
    if (!out_.training) out_.training.emplace();
    return *out_.training;
  }

  ToolResults out_;
  std::vector<EvalRow> pass_;
};

}  // namespace

bool is_json_file(const std::string& path) {
  const auto file = Env::posix().open_read(path);
  std::byte first{};
  return file.ok() && (*file)->read(0, {&first, 1}).ok() && first == std::byte{'{'};
}

Result<ToolResults> read_results(const std::string& path) {
  SQZ_ASSIGN_OR_RETURN(const std::string text, read_text_file(Env::posix(), path, kMostBytes));
  Reader reader;
  std::istringstream lines(text);
  int64_t number = 0;
  for (std::string line; std::getline(lines, line);) {
    ++number;
    if (line.empty()) continue;
    const std::string label = concat(path, ": line ", number);
    SQZ_ASSIGN_OR_RETURN(const JsonDocument event, parse_json(line, label));
    SQZ_RETURN_IF_ERROR(reader.add(event.root(), label));
  }
  ToolResults out = reader.take();
  if (out.rows.empty() && !out.layers && !out.training) {
    return Status(Code::kCorrupt,
                  bad_field(path, "lines", concat(number, ", and no result in them"),
                            "what sqz-eval, sqz-profile-layers or sqz-train-qmodel prints with "
                            "--json"));
  }
  return out;
}

}  // namespace sqz
