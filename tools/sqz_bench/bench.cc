#include "tools/sqz_bench/bench.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "libindex/parallel.h"
#include "libruntime/kernels/cpu/kernels.h"
#include "tools/sqz_bench/cases.h"
#include "tools/sqz_bench/device_cases.h"
#include "tools/sqz_bench/machine.h"

namespace sqz::bench {
namespace {

struct CaseInfo {
  const char* name;
  const char* what;
  Result<CaseSetup> (*set_up)(const Options&);
};
constexpr CaseInfo kCases[] = {
    {"attend", "one query token over the fixed context: dense, sparse, LibTorch, plain reads",
     attend_case},
    {"prefill", "a prompt's tokens over the fixed context: dense, sparse, LibTorch", prefill_case},
    {"bandwidth", "plain vector reads of memory, by number of threads", bandwidth_case},
    {"open", "opening a sparse file of 100 GiB, and smaller ones", open_case},
    {"verify", "all checksums and invariants of an index, beside plain reads of it", verify_case},
    {"kmeans", "clustering of one layer's keys, as in a build", kmeans_case},
    {"upload", "an index from the page cache to a GPU, beside copies from pinned memory",
     upload_device_case},
};

const CaseInfo* find_case(const std::string& name) {
  const auto* at = std::find_if(std::begin(kCases), std::end(kCases),
                                [&](const auto& c) { return c.name == name; });
  return at == std::end(kCases) ? nullptr : at;
}

Status check_options(const Options& options, const CommonOptions& common) {
  const auto refuse = [](const std::string& field, const std::string& found,
                         const std::string& expected) {
    return Status(Code::kInvalidArgument, bad_field("options", field, found, expected));
  };
  const auto all_of = [&](std::initializer_list<const char*> names) {
    return std::all_of(options.cases.begin(), options.cases.end(), [&](const std::string& name) {
      return std::count(names.begin(), names.end(), name) > 0;
    });
  };
  const bool on_cpu = !common.gpu();
  if (!on_cpu && !all_of({"attend", "prefill", "kmeans", "upload"})) {
    return refuse("--device", common.device,
                  "cpu; of the cases, attend, prefill, kmeans and upload run on a GPU");
  }
  if (on_cpu && std::count(options.cases.begin(), options.cases.end(), "upload") > 0) {
    return refuse("--device", common.device, "cuda, which is what upload goes to");
  }
  if (!options.capture.empty() && !all_of({"attend", "prefill", "kmeans"})) {
    return refuse("--capture", options.capture,
                  "nothing; it is for attend, prefill and kmeans alone");
  }
  for (const auto& [name, path] :
       {std::pair("--index", options.index), std::pair("--save-index", options.save_index)}) {
    if (path.empty() || (options.cases.size() == 1 && all_of({"attend", "prefill"}))) continue;
    return refuse(name, path, "nothing; it is for attend or prefill alone");
  }
  if (options.selector != "squeezed" &&
      (!all_of({"attend", "prefill"}) || !options.capture.empty())) {
    return refuse(
        "--selector", options.selector,
        concat("squeezed; ", options.selector, " is for attend and prefill without --capture"));
  }
  if (!options.index.empty() && !options.capture.empty()) {
    return refuse("--index", options.index, "nothing beside --capture");
  }
  if (options.query_heads % options.kv_heads != 0) {
    return refuse("--heads", concat(options.query_heads),
                  concat("a multiple of --kv-heads ", options.kv_heads));
  }
  if (options.tokens != 0 && options.tokens < 1000) {
    return refuse("--tokens", concat(options.tokens), "0 or at least 1000");
  }
  std::string names;
  for (const CaseInfo& info : kCases) names += concat(names.empty() ? "" : ", ", info.name);
  if (options.cases.empty()) return refuse("CASE", "none", names);
  for (const std::string& name : options.cases) {
    if (find_case(name) == nullptr) return refuse("CASE", name, names);
  }
  return {};
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

// A figure with three significant digits; "" where the object has none.
std::string figure(const JsonValue* object, std::string_view name, double scale = 1) {
  const JsonValue* value = object == nullptr ? nullptr : object->find(name);
  if (value == nullptr) return "";
  return printed("%.3g", value->number() * scale);
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
      out += concat("  ", kernel.key(), " ", figure(kernels, kernel.key()));
    }
    out += '\n';
  }
  return out;
}

std::string table(const char* name, const std::vector<std::string>& baselines,
                  const JsonValue& rows) {
  std::vector<std::vector<std::string>> lines = {
      {name, "median ms", "min", "p90", "GB/s", "GFLOP/s"}};
  for (const auto& baseline : baselines) lines[0].push_back("x " + baseline);
  lines[0].insert(lines[0].end(), {"of read", "keys", "bytes", "run", "SM MHz"});
  for (const JsonValue& row : rows.items()) {
    const JsonValue* seconds = row.find("seconds");
    lines.push_back({std::string(row.find("name")->string()), figure(seconds, "median", 1e3),
                     figure(seconds, "min", 1e3), figure(seconds, "p90", 1e3),
                     figure(&row, "gb_per_s"), figure(&row, "gflop_per_s")});
    for (const auto& baseline : baselines) {
      lines.back().push_back(figure(row.find("times_faster"), baseline));
    }
    for (const char* column : {"of_read", "keep", "budget", "keys_per_run"}) {
      lines.back().push_back(figure(&row, column));
    }
    const JsonValue* clock = row.find("clock");
    const JsonValue* mhz = clock == nullptr ? nullptr : clock->find("sm_mhz");
    const JsonValue* median = mhz == nullptr ? nullptr : mhz->find("median");
    lines.back().push_back(median == nullptr ? "" : concat(std::lround(median->number())));
  }
  std::string out;
  for (const auto& line : lines) {
    for (size_t c = 0; c < line.size(); ++c) {
      size_t width = 0;
      for (const auto& other : lines) width = std::max(width, other[c].size());
      if (width == 0) continue;
      const std::string space(width - line[c].size(), ' ');
      out += c == 0 ? line[c] + space : "  " + space + line[c];
    }
    out.erase(out.find_last_not_of(' ') + 1);
    out += '\n';
  }
  return out + kernel_table(rows) + "\n";
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
  SQZ_ASSIGN_OR_RETURN(const CaseSetup setup, info.set_up(options));
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
  SQZ_RETURN_IF_ERROR(check_options(options, context.options));
  if (const std::optional<int> gpu = context.options.gpu()) {
    options.gpu = *gpu;
    SQZ_RETURN_IF_ERROR(check_device(options));
  }
  options.threads = resolve_threads(context.options.threads);
  options.seed = context.options.seed;
  const std::string isa = options.isa.empty() ? cpu_kernels().name : options.isa;
  const JsonMembers machine = describe_machine(isa, options.threads);
  std::vector<JsonMembers> results;
  for (const std::string& name : options.cases) {
    SQZ_ASSIGN_OR_RETURN(JsonMembers result, run_case(*find_case(name), options, context));
    results.push_back(std::move(result));
  }
  context.output.result({{"machine", machine}, {"cases", results}}, machine_rows(machine));
  return {};
}

}  // namespace sqz::bench
