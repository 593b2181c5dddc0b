// The list of cases, the run and its report.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <filesystem>

#include "formats/base/parallel.h"
#include "libruntime/kernels/cpu/kernels.h"
#include "tools/common/output_file.h"
#include "tools/common/tool.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/machine.h"

namespace sqz::bench {
namespace {

using SetUp = Result<CaseSetup> (*)(const Options&);
struct CaseInfo {
  const char* name;
  const char* what;
  SetUp on_cpu, on_gpu;    // null: the case does not run there
  bool attention = false;  // and so takes --index, --save-index and --selector
  bool capture = false;    // takes --capture
};
constexpr CaseInfo kCases[] = {
    {"attend", "one query token over the fixed context: dense, sparse, LibTorch, plain reads",
     attend_case, attend_device_case, true, true},
    {"prefill", "a prompt's tokens over the fixed context: dense, sparse, LibTorch", prefill_case,
     prefill_device_case, true, true},
    {"bandwidth", "plain vector reads of memory, by number of threads", bandwidth_case, nullptr},
    {"open", "opening a sparse file of 100 GiB, and smaller ones", open_case, nullptr},
    {"verify", "all checksums and invariants of an index, beside plain reads of it", verify_case,
     nullptr},
    {"kmeans", "clustering of one layer's keys, as in a build", kmeans_case, kmeans_device_case,
     false, true},
    {"upload", "an index from the page cache to a GPU, beside copies from pinned memory", nullptr,
     upload_device_case},
};

Status refuse(const std::string& field, const std::string& found, const std::string& expected) {
  return {Code::kInvalidArgument, bad_field("options", field, found, expected)};
}

Result<std::vector<const CaseInfo*>> find_cases(const std::vector<std::string>& names) {
  std::string list;
  for (const CaseInfo& info : kCases) list += concat(list.empty() ? "" : ", ", info.name);
  if (names.empty()) return refuse("CASE", "none", list);
  std::vector<const CaseInfo*> out;
  for (const std::string& name : names) {
    const auto* at = std::find_if(std::begin(kCases), std::end(kCases),
                                  [&](const CaseInfo& info) { return info.name == name; });
    if (at == std::end(kCases)) return refuse("CASE", name, list);
    out.push_back(at);
  }
  return out;
}

Status check_options(const Options& options, const CommonOptions& common,
                     const std::vector<const CaseInfo*>& cases) {
  const auto all = [&](auto member) {
    return std::all_of(cases.begin(), cases.end(),
                       [&](const CaseInfo* info) { return info->*member; });
  };
  const bool attention = all(&CaseInfo::attention);
  const bool one_index = attention && cases.size() == 1;
  const struct {
    bool fine;
    const char* field;
    std::string found, expected;
  } checks[] = {
      {common.device != "cuda:all", "--device", common.device, "one: cpu, cuda or cuda:N"},
      {!common.gpu() || all(&CaseInfo::on_gpu), "--device", common.device,
       "cpu; of the cases, attend, prefill, kmeans and upload run on a GPU"},
      {common.gpu() || all(&CaseInfo::on_cpu), "--device", common.device,
       "cuda, which is what upload goes to"},
      {options.capture.empty() || all(&CaseInfo::capture), "--capture", options.capture,
       "nothing; it is for attend, prefill and kmeans alone"},
      {options.index.empty() || one_index, "--index", options.index,
       "nothing; it is for attend or prefill alone"},
      {options.save_index.empty() || one_index, "--save-index", options.save_index,
       "nothing; it is for attend or prefill alone"},
      {options.save_index.empty() || options.index.empty(), "--save-index", options.save_index,
       "nothing beside --index"},
      {options.selector == "squeezed" || (attention && options.capture.empty()), "--selector",
       options.selector,
       concat("squeezed; ", options.selector, " is for attend and prefill without --capture")},
      {options.selector == "squeezed" || (options.rows == "bf16" && options.key_codes == 0),
       "--selector", options.selector, "squeezed, whose rows --rows and --key-codes are about"},
      {options.index.empty() || options.capture.empty(), "--index", options.index,
       "nothing beside --capture"},
      {options.query_heads % options.kv_heads == 0, "--heads", concat(options.query_heads),
       concat("a multiple of --kv-heads ", options.kv_heads)},
      {options.level_fractions.size() == 2 || !options.capture.empty(), "--level-fractions",
       concat(options.level_fractions.size()),
       "two, which made-up indexes have; one with --capture"},
      {std::adjacent_find(options.level_fractions.begin(), options.level_fractions.end(),
                          std::greater_equal<>()) == options.level_fractions.end(),
       "--level-fractions", CLI::detail::join(options.level_fractions, ","),
       "the coarse level first, which has fewer clusters"},
      {options.tokens == 0 || options.tokens >= 1000, "--tokens", concat(options.tokens),
       "0 or at least 1000"},
  };
  for (const auto& check : checks) {
    if (!check.fine) return refuse(check.field, check.found, check.expected);
  }
  return {};
}

Status check_saved(const std::string& path) {
  std::error_code error;
  if (path.empty()) return {};
  if (!std::filesystem::exists(path, error)) return check_output(path, false);
  return {Code::kExists,
          concat("--save-index: ", path, " exists; give another name, or remove it first")};
}

// A number that was put into a row.
double number(const JsonText& text) {
  return std::strtod(text.str().c_str(), nullptr);
}

JsonMembers row_of(const CaseSetup& setup, const Measured& measured, size_t i) {
  const Contender& contender = setup.contenders[i];
  const Spread spread = spread_of(measured.seconds[i]);
  JsonMembers row = {
      {"name", contender.name},
      {"seconds", {{"min", spread.least}, {"median", spread.median}, {"p90", spread.p90}}}};
  if (contender.part != 1) row["part"] = contender.part;
  if (contender.bytes > 0) row["gb_per_s"] = contender.bytes / spread.median * 1e-9;
  if (contender.flop > 0) row["gflop_per_s"] = contender.flop / spread.median * 1e-9;
  JsonMembers faster;
  for (size_t b = 0; b < setup.contenders.size(); ++b) {
    const std::string& name = setup.contenders[b].name;
    if (std::count(setup.baselines.begin(), setup.baselines.end(), name) == 0) continue;
    faster[name] = times_faster(measured, i, b) * contender.part / setup.contenders[b].part;
  }
  if (!faster.empty()) row["times_faster"] = faster;
  if (contender.details) {
    for (auto& [name, value] : contender.details()) row[name] = value;
  }
  for (const auto& [amount, rate] :
       {std::pair("bytes_read", "gb_per_s"), std::pair("flop", "gflop_per_s")}) {
    if (row.contains(amount)) row[rate] = number(row[amount]) / spread.median * 1e-9;
  }
  return row;
}

struct Column {
  std::string title;
  std::vector<std::string> path;  // of members, in a row
  const char* format = "%.3g";
  double scale = 1;
};

// "" where the row has no such member.
std::string cell(const JsonValue& row, const Column& column) {
  const JsonValue* value = &row;
  for (const std::string& name : column.path) {
    value = value->find(name);
    if (value == nullptr) return "";
  }
  if (value->is_string()) return std::string(value->string());
  char text[32];
  std::snprintf(text, sizeof(text), column.format, value->number() * column.scale);
  return text;
}

// Microseconds a call, by kernel, of the rows that have them.
std::string kernel_table(const JsonValue& rows) {
  std::string out;
  for (const JsonValue& row : rows.items()) {
    const JsonValue* kernels = row.find("kernels_us");
    if (kernels == nullptr) continue;
    out += concat("  ", row.find("name")->string(), ", us:");
    if (kernels->is_string()) out += concat(" ", kernels->string());
    for (const JsonValue& kernel : kernels->items()) {
      out += concat("  ", kernel.key(), " ", cell(kernel, {}));
    }
    out += '\n';
  }
  return out;
}

std::string table(const char* name, const std::vector<std::string>& baselines,
                  const JsonValue& rows) {
  std::vector<Column> columns = {{name, {"name"}},
                                 {"median ms", {"seconds", "median"}, "%.3g", 1e3},
                                 {"min", {"seconds", "min"}, "%.3g", 1e3},
                                 {"p90", {"seconds", "p90"}, "%.3g", 1e3},
                                 {"GB/s", {"gb_per_s"}},
                                 {"GFLOP/s", {"gflop_per_s"}}};
  for (const auto& one : baselines) columns.push_back({"x " + one, {"times_faster", one}});
  columns.insert(columns.end(), {{"of read", {"of_read"}},
                                 {"keys", {"keep"}},
                                 {"bytes", {"budget"}},
                                 {"run", {"keys_per_run"}},
                                 {"SM MHz", {"clock", "sm_mhz", "median"}, "%.0f"}});
  std::vector<std::vector<std::string>> lines(1 + rows.size());
  for (const Column& column : columns) {
    lines[0].push_back(column.title);
    for (size_t i = 0; i < rows.size(); ++i) lines[i + 1].push_back(cell(rows[i], column));
  }
  return columns_text(lines, 1) + kernel_table(rows) + "\n";
}

// "of_read": a row's bytes a second beside those of the row `read`.
void share_of_reads(std::vector<JsonMembers>& rows) {
  const auto read = std::find_if(rows.begin(), rows.end(), [](const JsonMembers& row) {
    return row.at("name") == JsonText("read");
  });
  if (read == rows.end()) return;
  const double most = number(read->at("gb_per_s"));
  for (JsonMembers& row : rows) {
    if (row.contains("gb_per_s")) row["of_read"] = number(row["gb_per_s"]) / most;
  }
}

Result<JsonMembers> run_case(const CaseInfo& info, const Options& options,
                             const ToolContext& context) {
  SQZ_ASSIGN_OR_RETURN(const CaseSetup setup,
                       (options.gpu < 0 ? info.on_cpu : info.on_gpu)(options));
  Progress progress(context.progress_style(), info.name);
  const auto runs = static_cast<double>(setup.contenders.size()) * double(setup.rounds + 1);
  double done = 0;
  SQZ_ASSIGN_OR_RETURN(const Measured measured, measure(setup.contenders, setup.rounds,
                                                        [&] { progress.update(++done / runs); }));
  progress.finish();
  std::vector<JsonMembers> rows;
  for (size_t i = 0; i < setup.contenders.size(); ++i) {
    rows.push_back(row_of(setup, measured, i));
  }
  share_of_reads(rows);
  for (JsonMembers event : rows) {
    event["case"] = info.name;
    context.output.event("row", event);
  }
  context.output.text(concat(info.name, " ", JsonText(setup.shape).str(), "\n",
                             table(info.name, setup.baselines, JsonText(rows).parsed().root())));
  return JsonMembers{{"case", info.name},
                     {"shape", setup.shape},
                     {"rounds", setup.rounds},
                     {"baselines", setup.baselines},
                     {"rows", rows}};
}

}  // namespace

Status run_bench(Options options, const ToolContext& context) {
  if (options.list) {
    Rows rows;
    std::vector<std::string> names;
    for (const CaseInfo& info : kCases) {
      rows.emplace_back(info.name, info.what);
      names.push_back(info.name);
    }
    context.output.result({{"cases", names}}, rows);
    return {};
  }
  SQZ_ASSIGN_OR_RETURN(const auto cases, find_cases(options.cases));
  SQZ_RETURN_IF_ERROR(check_options(options, context.options, cases));
  SQZ_RETURN_IF_ERROR(check_saved(options.save_index));
  if (const std::optional<int> gpu = context.options.gpu()) {
    options.gpu = *gpu;
    SQZ_RETURN_IF_ERROR(check_device(options));
  }
  options.threads = resolve_threads(context.options.threads);
  options.seed = context.options.seed;
  const std::string isa = options.isa.empty() ? cpu_kernels().name : options.isa;
  const Machine machine = describe_machine(isa, options.threads);
  std::vector<JsonMembers> results;
  for (const CaseInfo* info : cases) {
    SQZ_ASSIGN_OR_RETURN(JsonMembers result, run_case(*info, options, context));
    results.push_back(std::move(result));
  }
  context.output.result({{"machine", machine.fields}, {"cases", results}}, machine.rows);
  return {};
}

}  // namespace sqz::bench
