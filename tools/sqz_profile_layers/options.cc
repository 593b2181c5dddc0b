#include <algorithm>
#include <sstream>

#include "tools/common/model_options.h"
#include "tools/sqz_eval/settings.h"
#include "tools/sqz_profile_layers/profile_layers.h"

namespace sqz {
namespace {

Result<double> p_of(const std::string& text, const char* option) {
  double value = 0;
  if (CLI::detail::lexical_cast(text, value) && value > 0 && value <= 1) return value;
  return Status(Code::kInvalidArgument,
                concat(option, ": p: found ", text, ", expected a number in (0, 1]"));
}

// Those that serve from indexes made of the windows alone.
std::vector<std::string> measured_selectors() {
  std::vector<std::string> out = eval::known_selectors();
  std::erase_if(out, [](const std::string& name) {
    const eval::SelectorTraits& traits = *eval::find_selector(name);
    return !traits.budget || traits.qmodel();
  });
  return out;
}

void add_measure_options(CLI::App& app, ProfileArguments& arguments) {
  const HelpSection section(app, "Measuring on held-out text");
  app.add_option("--allocate", arguments.allocate,
                 "groups (the paper's) or measured: by what each layer's own errors cost")
      ->check(CLI::IsMember({"groups", "measured"}));
  app.add_option("--sweep", arguments.sweep,
                 "Values of p to measure: p=1,0.9,0.7 (with --p auto 1 to 0.3)")
      ->type_name("p=LIST");
  app.add_option("--selector", arguments.selector, "What reads")
      ->check(CLI::IsMember(measured_selectors()));
  app.add_option("--rule", arguments.rule, "Of squeezed and ideal")
      ->check(CLI::IsMember({"threshold", "budget"}));
  app.add_option("--block", arguments.block,
                 "Held-out tokens that share a selection; 0 = all of them")
      ->check(whole_number(0));
  app.add_option("--held-out", arguments.held_out,
                 "Tokens behind each window whose loss is measured")
      ->check(CLI::Range(int64_t{128}, int64_t{65536}))
      ->type_name("N");
}

}  // namespace

void add_profile_options(CLI::App& app, ProfileArguments& arguments) {
  app.add_option("TEXT", arguments.texts,
                 "Text files, or folders of them (recursive, sorted); - reads standard input")
      ->required();
  app.add_option("-m,--model", arguments.model, "Model: a Hugging Face checkpoint directory")
      ->required();
  app.add_option("-o,--output", arguments.output,
                 "The layer profile (.sqz) to write; may be left out with --index");
  app.add_option("-i,--index", arguments.index,
                 "Profile on this index's context, which TEXT begins with, and embed the budgets "
                 "into it");
  app.add_flag("--force", arguments.force, "Replace an existing output");
  app.add_option("--tokens", arguments.tokens,
                 "Tokens of a window, which is one dense pass (default: the model's positions, at "
                 "most 16384)")
      ->check(whole_number(1))
      ->type_name("N");
  app.add_option("--windows", arguments.windows, "Windows of each text; 0 = all of it")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 20))
      ->type_name("N")
      ->capture_default_str();
  app.add_option("--budget", arguments.budget,
                 "Fraction of the context that a layer reads, if all "
                 "read the same")
      ->check(real_number(1e-9, 1.0))
      ->capture_default_str();
  app.add_option("--p", arguments.p,
                 "Share of it that layers of group 2 keep, in (0, 1]; 1 = all layers alike; auto = "
                 "the one with the lowest loss")
      ->capture_default_str();
  app.add_option("--context", arguments.context,
                 "Tokens of the context that budgets are for (default: those of a window)")
      ->check(CLI::Range(int64_t{1}, int64_t{UINT32_MAX}))
      ->type_name("N");
  add_run_dtype_option(app, arguments.run_dtype);
  add_measure_options(app, arguments);
}

Result<ProfileNumbers> profile_numbers(const ProfileArguments& arguments) {
  const auto refuse = [](std::string message) {
    return Status(Code::kInvalidArgument, std::move(message));
  };
  ProfileNumbers out;
  if (arguments.p != "auto") {
    SQZ_ASSIGN_OR_RETURN(out.p, p_of(arguments.p, "--p"));
  }
  if (arguments.output.empty() && arguments.index.empty()) {
    return refuse("-o: found none, expected the layer profile to write, or --index");
  }
  if (arguments.allocate == "measured" && arguments.p != "1") {
    return refuse("--allocate measured takes no --p: pass --sweep to have values of p beside it");
  }
  if (!arguments.index.empty() && (arguments.tokens != 0 || arguments.windows != 1)) {
    return refuse("--index brings its context with it: pass no --tokens or --windows beside it");
  }
  std::string sweep =
      arguments.sweep.empty() && arguments.p == "auto" ? kStandardSweep : arguments.sweep;
  if (sweep.starts_with("p=")) sweep = sweep.substr(2);
  std::istringstream list(sweep);
  for (std::string text; std::getline(list, text, ',');) {
    SQZ_ASSIGN_OR_RETURN(const double p, p_of(text, "--sweep"));
    if (std::find(out.sweep.begin(), out.sweep.end(), p) == out.sweep.end()) {
      out.sweep.push_back(p);
    }
  }
  if (out.sweep.empty() && !arguments.sweep.empty()) {
    return refuse(concat("--sweep: found ", arguments.sweep, ", expected a list: p=1,0.9,0.7"));
  }
  return out;
}

}  // namespace sqz
