#include "tools/common/tool.h"

#include <signal.h>
#include <spdlog/pattern_formatter.h>
#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <new>

#include "formats/base/parallel.h"
#include "formats/base/temporaries.h"

namespace sqz {
namespace {

constexpr const char* kCommonNotes =
    "Exit codes: 0 ok; 1 the system refused, an output exists, or a bug; 2 options that cannot be "
    "used, together or with this input or machine; 3 bad input file: missing, broken, unsupported "
    "or of another model.\n";

// Whether a text is a whole number that a Number can hold.
template <class Number>
bool fits(std::string_view text) {
  Number value;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

template <class Number>
std::function<std::string(std::string&)> in_range(Number least, Number most) {
  return [least, most](const std::string& text) {
    Number value{};
    const bool good = CLI::detail::lexical_cast(text, value) && value >= least && value <= most;
    return good ? std::string() : concat("expected ", least, " to ", most, ", found ", text);
  };
}

// Examples stand behind the usage.
class HelpFormatter : public CLI::Formatter {
 public:
  explicit HelpFormatter(std::string examples) : examples_(std::move(examples)) {}
  std::string make_usage(const CLI::App* app, std::string name) const override {
    return CLI::Formatter::make_usage(app, name) + examples_;
  }
  // The error says which options exclude each other; a list at every option hides the rest.
  std::string make_option_opts(const CLI::Option* option) const override {
    const std::string all = CLI::Formatter::make_option_opts(option);
    return all.substr(0, all.find(" Excludes: "));
  }

 private:
  std::string examples_;
};

// By default, idle OpenMP threads spin for milliseconds on cores that the threads of clustering and
// of the runtime need. OpenMP reads its environment when it is loaded, so this starts the program
// again. Returns if the policy is set, or if the start fails.
void let_openmp_sleep(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  if (::setenv("OMP_WAIT_POLICY", "passive", 1) == 0) ::execv("/proc/self/exe", argv);
}

bool terminal = false;  // standard error is one

void on_signal(int signal) {
  remove_temporaries();
  if (terminal) (void)!::write(STDERR_FILENO, "\n", 1);  // behind a bar
  ::raise(signal);                                       // the action is the default one by now
}

// SIGINT, SIGTERM and SIGHUP end a tool at once, as they do by default, but its temporary files are
// removed first. A signal that the parent ignores (nohup) stays ignored. A file that grows beyond
// the limit of its size is an error of the write.
void handle_signals() {
  ::signal(SIGXFSZ, SIG_IGN);
  terminal = ::isatty(STDERR_FILENO) == 1;
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action = {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESETHAND | SA_NODEFER;
    sigaction(signal, &action, nullptr);
  }
}

// The text of a message, without bytes that command a terminal.
class PrintableText : public spdlog::custom_flag_formatter {
 public:
  void format(const spdlog::details::log_msg& message, const std::tm&,
              spdlog::memory_buf_t& out) override {
    const std::string text = printable({message.payload.data(), message.payload.size()});
    out.append(text.data(), text.data() + text.size());
  }
  std::unique_ptr<custom_flag_formatter> clone() const override {
    return std::make_unique<PrintableText>();
  }
};

void set_up_log(const std::string& name, const CommonOptions& options) {
  auto logger = spdlog::stderr_color_mt(name);
  auto formatter = std::make_unique<spdlog::pattern_formatter>();
  formatter->add_flag<PrintableText>('*').set_pattern("%n: %^%l%$: %*");
  logger->set_formatter(std::move(formatter));
  logger->set_level(options.quiet > 1   ? spdlog::level::off
                    : options.quiet > 0 ? spdlog::level::err
                    : options.verbose   ? spdlog::level::debug
                                        : spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace

int exit_code(const Status& status) {
  switch (status.code()) {
    case Code::kOk:
      return kExitOk;
    case Code::kInvalidArgument:
      return kExitUsage;
    case Code::kNotFound:
    case Code::kCorrupt:
    case Code::kUnsupported:
    case Code::kMismatch:
    case Code::kNumeric:
      return kExitBadInput;
    default:
      return kExitError;
  }
}

std::optional<int> CommonOptions::gpu() const {
  if (device == "cpu") return std::nullopt;
  return device.starts_with("cuda:") ? std::atoi(device.c_str() + 5) : 0;
}

ProgressStyle ToolContext::progress_style() const {
  return sqz::progress_style(options.progress, ::isatty(STDERR_FILENO) == 1, options.quiet > 0);
}

int limited_threads(int asked) {
  const int cores = resolve_threads(0);
  if (asked > cores) {
    spdlog::warn("--threads {}: this process may use {} cores, so as many threads run", asked,
                 cores);
  }
  return asked == 0 ? cores : std::min(asked, cores);
}

CLI::Validator whole_number(int64_t least) {
  CLI::Validator out;
  out.operation(in_range<int64_t>(least, int64_t{1} << 31));
  return out;
}

CLI::Validator real_number(double least, double most) {
  CLI::Validator out = CLI::Range(least, most);  // for --help; it accepts NaN
  out.operation(in_range<double>(least, most));
  return out;
}

CLI::Validator device_name() {
  CLI::Validator out;
  out.operation([](const std::string& device) {
    const bool known = device == "cpu" || device == "cuda" ||
                       (device.starts_with("cuda:") && fits<uint16_t>(device.substr(5)));
    return known ? std::string() : "expected cpu, cuda or cuda:N, found " + device;
  });
  return out;
}

Tool::Tool(const std::string& name, const std::string& description, const std::string& notes)
    : name_(name), app_(description, name), chosen_(&app_) {
  app_.set_version_flag("--version", name + " " + SQZ_VERSION);
  set_notes(app_, notes);
}

void Tool::set_notes(CLI::App& app, const std::string& notes) {
  const size_t examples = std::min(notes.find("Example"), notes.size());
  app.footer(notes.substr(0, examples) + (examples > 0 ? "\n" : "") + kCommonNotes);
  app.formatter(std::make_shared<HelpFormatter>("\n" + notes.substr(examples)));
}

CLI::App* Tool::command(const std::string& name, const std::string& description,
                        const std::string& notes, Run run) {
  app_.require_subcommand(1);
  CLI::App* sub = app_.add_subcommand(name, description);
  set_notes(*sub, notes);
  add_common_options(*sub);
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
  app.add_flag("-q,--quiet", options_.quiet,
               "Print results and errors alone; twice: nothing, the exit code says it");
  app.add_flag("-v,--verbose", options_.verbose, "Say more");
  app.add_flag_function(
      "--progress,!--no-progress", [this](int64_t count) { options_.progress = count > 0; },
      "Force or forbid the progress bar (default: on a terminal; elsewhere a line every 30 "
      "seconds)");
  app.add_option("--threads", options_.threads,
                 "CPU threads, at most the cores that this process may use; 0 = all of these. "
                 "Results do not depend on it")
      ->check(CLI::Range(0, 4096));
  app.add_option("--seed", options_.seed, "Seed of everything random")
      ->check([](const std::string& text) {
        return fits<uint64_t>(text) ? std::string()
                                    : concat("expected 0 to ", UINT64_MAX, ", found ", text);
      });
  app.add_option("--device", options_.device,
                 "Where the model runs and indexes are served: cpu, cuda or cuda:N")
      ->check(device_name());
}

std::string Tool::problem(const CLI::ParseError& error) const {
  const std::vector<std::string> extra = app_.remaining(true);
  const auto is_option = [](const std::string& word) { return word.starts_with("-"); };
  const auto option = std::find_if(extra.begin(), extra.end(), is_option);
  const auto word = std::find_if_not(extra.begin(), extra.end(), is_option);
  std::string commands;
  for (const CLI::App* sub : app_.get_subcommands({})) {
    commands += concat(commands.empty() ? "" : ", ", sub->get_name());
  }
  if (chosen_ == &app_ && !commands.empty()) {
    return word == extra.end() ? "a command is required: " + commands
                               : concat("no command ", *word, "; expected ", commands);
  }
  if (option != extra.end()) {
    const std::string name = option->substr(0, option->find('='));
    std::string nearest;  // begins alike
    size_t alike = 4;
    for (const CLI::Option* known : chosen_->get_options()) {
      const std::string other = known->get_name();
      const auto end = std::mismatch(name.begin(), name.end(), other.begin(), other.end()).first;
      if (end - name.begin() <= static_cast<std::ptrdiff_t>(alike)) continue;
      alike = static_cast<size_t>(end - name.begin());
      nearest = "; did you mean " + other + "?";
    }
    return concat("no option ", name, nearest);
  }
  return word == extra.end() ? error.what() : "unexpected argument " + *word;
}

int Tool::parse(int argc, char** argv, bool& done) {
  std::vector<std::string> arguments(argv + 1, argv + argc);
  const auto word = std::find_if(arguments.begin(), arguments.end(),
                                 [](const std::string& text) { return !text.starts_with("-"); });
  for (CLI::App* sub : app_.get_subcommands({})) {
    if (word != arguments.end() && *word == sub->get_name()) chosen_ = sub;
  }
  done = true;
  try {
    std::reverse(arguments.begin(), arguments.end());
    app_.parse(std::move(arguments));
  } catch (const CLI::Success& help) {  // --help, --version
    const int code = app_.exit(help);
    const Status written = finish_stdout();
    if (!written.ok()) say_error(written);
    return written.ok() ? code : exit_code(written);
  } catch (const CLI::ParseError& error) {
    const Status refused(Code::kInvalidArgument, problem(error));
    // Options behind the wrong one may not have been read.
    const bool json = options_.json || std::count(argv, argv + argc, std::string("--json")) > 0;
    Output(json, options_.quiet > 1).error(refused);
    say_error(refused);
    return kExitUsage;
  }
  done = false;
  return kExitOk;
}

int Tool::run(int argc, char** argv, bool sleeping_openmp) {
  bool done = false;
  const int code = parse(argc, argv, done);
  if (done) return code;
  if (sleeping_openmp) let_openmp_sleep(argv);
  handle_signals();
  set_up_log(name_, options_);
  options_.threads = limited_threads(options_.threads);
  const ToolContext context{options_, Output(options_.json, options_.quiet > 1)};
  const auto run = [&]() -> Status {
    try {
      return run_(context);
    } catch (const std::bad_alloc&) {
      return {Code::kOutOfMemory, "not enough memory; use fewer tokens or a larger machine"};
    } catch (const std::exception& error) {
      return {Code::kInternal, concat("unexpected failure: ", error.what())};
    }
  };
  return finish(run(), context.output);
}

int Tool::finish(const Status& found, const Output& output) const {
  const Status status = found.ok() ? finish_stdout() : found;
  if (status.ok()) return kExitOk;
  output.error(status);
  say_error(status);
  return exit_code(status);
}

void Tool::say_error(const Status& status) const {
  if (options_.quiet > 1) return;
  std::cerr << name_ << ": error: " << printable(status.message()) << '\n';
  if (exit_code(status) != kExitUsage) return;
  const std::string command = chosen_ == &app_ ? "" : " " + chosen_->get_name();
  std::cerr << "Run '" << name_ << command << " --help' for the options.\n";
}

}  // namespace sqz
