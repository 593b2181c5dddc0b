#include "tools/common/tool.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <memory>
#include <new>

#include "tools/common/exit_codes.h"
#include "tools/common/openmp_wait.h"
#include "tools/common/signals.h"

namespace sqz {
namespace {

constexpr const char* kExitCodes =
    "Exit codes: 0 ok; 1 the system refused, an output exists, or a bug; 2 options that cannot be "
    "used, together or with this input or machine; 3 bad input file: missing, broken, unsupported "
    "or of another model; 4 stopped, --resume goes on; 130 stopped by SIGINT, 143 by SIGTERM or "
    "SIGHUP: nothing half-written is left.\n";

// Whether a text is a whole number that a Number can hold.
template <class Number>
bool fits(std::string_view text) {
  Number value;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

std::string footer(const std::string& examples) {
  return examples + "\n" + kExitCodes;
}

// --some-name -> SQZ_SOME_NAME, for every option but --help and --version.
void set_environment_names(CLI::App& app) {
  for (CLI::Option* option : app.get_options()) {
    const auto& names = option->get_lnames();
    if (names.empty() || option->get_positional()) continue;
    std::string name = names.front();
    if (name == "help" || name == "version") continue;
    std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) {
      return static_cast<char>(c == '-' ? '_' : std::toupper(c));
    });
    option->envname("SQZ_" + name);
  }
}

void set_up_log(const std::string& name, const CommonOptions& options) {
  auto logger = spdlog::stderr_color_mt(name);
  logger->set_pattern("%n: %^%l%$: %v");
  logger->set_level(options.quiet > 1     ? spdlog::level::off
                    : options.quiet == 1  ? spdlog::level::err
                    : options.verbose > 1 ? spdlog::level::trace
                    : options.verbose > 0 ? spdlog::level::debug
                                          : spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace

std::optional<int> CommonOptions::gpu() const {
  if (device == "cpu") return std::nullopt;
  return device.starts_with("cuda:") ? std::atoi(device.c_str() + 5) : 0;
}

ProgressStyle ToolContext::progress_style() const {
  return sqz::progress_style(options.progress, ::isatty(STDERR_FILENO) == 1, options.quiet > 0);
}

CLI::Validator whole_number(int64_t least) {
  static constexpr int64_t kMost = int64_t{1} << 31;
  CLI::Validator out;
  out.operation([least](const std::string& text) {
    int64_t value = 0;
    const bool number = CLI::detail::lexical_cast(text, value);
    return number && value >= least && value <= kMost
               ? std::string()
               : concat("expected ", least, " to ", kMost, ", found ", text);
  });
  return out;
}

CLI::Validator real_number(double least, double most) {
  CLI::Validator out = CLI::Range(least, most);  // its --help; it takes NaN
  out.operation([least, most](const std::string& text) {
    double value = 0;
    const bool good = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
    return good ? std::string() : concat("expected ", least, " to ", most, ", found ", text);
  });
  return out;
}

void refuse_given(const CLI::App& app, const std::vector<std::string>& names,
                  const std::string& why) {
  for (const std::string& name : names) {
    const CLI::Option* option = app.get_option(name);
    if (option->count() == 0 || std::getenv(option->get_envname().c_str()) != nullptr) continue;
    throw CLI::ValidationError(name, why);
  }
}

Tool::Tool(const std::string& name, const std::string& description, const std::string& examples)
    : name_(name), app_(description, name) {
  app_.set_version_flag("--version", name + " " + SQZ_VERSION);
  app_.footer(footer(examples));
}

CLI::App* Tool::command(const std::string& name, const std::string& description,
                        const std::string& examples, Run run) {
  app_.require_subcommand(1);
  CLI::App* sub = app_.add_subcommand(name, description);
  sub->footer(footer(examples));
  add_common_options(*sub);
  // A callback on completion also keeps CLI11 from reading the environment for other subcommands.
  sub->parse_complete_callback([this, run = std::move(run)] { run_ = run; });
  return sub;
}

CLI::App* Tool::only_command(Run run) {
  add_common_options(app_);
  run_ = std::move(run);
  return &app_;
}

void Tool::add_common_options(CLI::App& app) {
  const HelpSection section(app, "Common options");
  app.add_flag(
      "--json", options_.json,
      "Print JSON, one object a line, each with `event`; the last is the result or the error");
  app.add_flag("-q,--quiet", options_.quiet, "Print errors only; twice: nothing");
  app.add_flag("-v,--verbose", options_.verbose, "Say more; twice: everything");
  app.add_flag_function(
      "--progress,!--no-progress", [this](int64_t count) { options_.progress = count > 0; },
      "Force or forbid the progress bar (default: on a terminal; elsewhere a line every 30 "
      "seconds)");
  app.add_option("--threads", options_.threads,
                 "CPU threads; 0 = all cores. Results do not depend on it")
      ->check(CLI::Range(0, 4096));
  app.add_option("--seed", options_.seed, "Seed of everything random")
      ->check([](const std::string& text) {
        return fits<uint64_t>(text) ? std::string()
                                    : concat("expected 0 to ", UINT64_MAX, ", found ", text);
      });
  app.add_option("--device", options_.device,
                 "Where the model runs and indexes are served: cpu, cuda or cuda:N (of a manifest "
                 "cuda:all, every GPU)")
      ->check([](const std::string& device) {
        const bool known = device == "cpu" || device == "cuda" || device == "cuda:all" ||
                           (device.starts_with("cuda:") && fits<uint16_t>(device.substr(5)));
        return known ? std::string() : "expected cpu, cuda, cuda:N or cuda:all, found " + device;
      });
}

// CLI11 says that a command is missing, not which word is none.
std::string Tool::problem(const std::string& said, int argc, char** argv) const {
  std::string commands;
  for (const CLI::App* sub : app_.get_subcommands({})) {
    commands += concat(commands.empty() ? "" : ", ", sub->get_name());
  }
  const bool named = argc > 1 && argv[1][0] != '-' && app_.get_subcommands().empty();
  if (commands.empty() || !named) return said;
  return concat("no command ", argv[1], "; expected ", commands);
}

int Tool::parse(int argc, char** argv, bool& done) {
  set_environment_names(app_);
  for (CLI::App* sub : app_.get_subcommands({})) set_environment_names(*sub);
  try {
    app_.parse(argc, argv);
    done = false;
    return kExitOk;
  } catch (const CLI::Success& help) {  // --help, --version
    done = true;
    const int code = app_.exit(help);
    const Status written = finish_stdout();
    if (!written.ok()) std::cerr << name_ << ": " << written.message() << '\n';
    return written.ok() ? code : exit_code(written);
  } catch (const CLI::ParseError& error) {
    done = true;
    const auto chosen = app_.get_subcommands();
    const std::string help = chosen.empty() ? name_ : name_ + " " + chosen.front()->get_name();
    const std::string message = problem(error.what(), argc, argv);
    // Options behind the wrong one may not have been read.
    const bool json = options_.json || std::count(argv, argv + argc, std::string("--json")) > 0;
    Output(json).error({Code::kInvalidArgument, message});
    std::cerr << name_ << ": " << printable(message) << "\nRun '" << help
              << " --help' for what can be given.\n";
    return kExitUsage;
  }
}

int Tool::run(int argc, char** argv, bool sleeping_openmp) {
  bool done = false;
  const int code = parse(argc, argv, done);
  if (done) return code;
  if (sleeping_openmp) let_openmp_sleep(argv);
  // The thread that watches may outlive this function.
  const std::shared_ptr<const ToolContext> context(
      new ToolContext{options_, Output(options_.json)});
  watch_signals(name_, [context] { context->output.error(check_stop()); });
  set_up_log(name_, options_);
  const auto run = [&]() -> Status {
    try {
      return run_(*context);
    } catch (const std::bad_alloc&) {
      return {Code::kOutOfMemory, "not enough memory; use fewer tokens or a larger machine"};
    } catch (const std::exception& error) {
      return {Code::kInternal, concat("unexpected failure: ", error.what())};
    }
  };
  return finish(run(), context->output);
}

int Tool::finish(const Status& found, const Output& output) const {
  const Status status = found.ok() ? finish_stdout() : found;
  if (status.ok()) return kExitOk;
  output.error(status);
  if (stop_requested()) return stop_exit_code();
  spdlog::error("{}", printable(status.message()));
  return exit_code(status);
}

}  // namespace sqz
