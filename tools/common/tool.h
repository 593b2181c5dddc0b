// What all tools share: the common options, environment variables, --help with examples and exit
// codes, logging, signals, and the way from a Status to an exit code.
//
//   int main(int argc, char** argv) {
//     sqz::Tool tool("sqz-index", "Builds ...", "Examples: ...");
//     CLI::App* build = tool.command("build", "...", "...", [&](const ToolContext&) { ... });
//     build->add_option(...);
//     return tool.run(argc, argv);
//   }
//
// Every long option --some-name may also be given as SQZ_SOME_NAME; the command line wins.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "formats/base/status.h"
#include "tools/common/output.h"
#include "tools/common/progress.h"

namespace sqz {

struct CommonOptions {
  bool json = false;
  int quiet = 0;    // -q: errors only; -qq: nothing on stderr
  int verbose = 0;  // -v: debug messages; -vv: all
  int threads = 0;  // 0: all cores
  uint64_t seed = 0;
  std::string device = "cpu";
  std::optional<bool> progress;

  std::optional<int> gpu() const;  // number of the CUDA device; none: the CPU
};

struct ToolContext {
  CommonOptions options;
  Output output;

  ProgressStyle progress_style() const;
};

// Whole numbers from `least` on, as far as any makes sense. --help does not print the range.
CLI::Validator whole_number(int64_t least);

// Numbers from `least` to `most`. --help prints the range.
CLI::Validator real_number(double least, double most);

// From a callback of `app`: none of these options may be on the command line, because what they say
// would not be used; `why` says so, and what to do. Variables are for every tool and may be set.
void refuse_given(const CLI::App& app, const std::vector<std::string>& names,
                  const std::string& why);

// Options that are added while it lives stand in this section of --help, with their defaults.
class HelpSection {
 public:
  HelpSection(CLI::App& app, const std::string& title) : app_(app) {
    app.option_defaults()->always_capture_default()->group(title);
  }
  ~HelpSection() {
    app_.option_defaults()->always_capture_default(false)->group("Options");
    for (CLI::Option* option : app_.get_options()) {
      if (option->get_default_str() == "[]") option->default_str("");  // an empty list
    }
  }
  HelpSection(const HelpSection&) = delete;
  HelpSection& operator=(const HelpSection&) = delete;

 private:
  CLI::App& app_;
};

class Tool {
 public:
  using Run = std::function<Status(const ToolContext&)>;

  Tool(const std::string& name, const std::string& description, const std::string& examples);

  // A subcommand; the caller adds its own options to what is returned.
  CLI::App* command(const std::string& name, const std::string& description,
                    const std::string& examples, Run run);
  // For a tool without subcommands.
  CLI::App* only_command(Run run);

  // Parses, runs, and returns the exit code. Catches whatever is thrown. With `sleeping_openmp`, of
  // tools that work for minutes, let_openmp_sleep() comes before the work (openmp_wait.h).
  int run(int argc, char** argv, bool sleeping_openmp = false);

 private:
  void add_common_options(CLI::App& app);
  int parse(int argc, char** argv, bool& done);
  std::string problem(const std::string& said, int argc, char** argv) const;
  int finish(const Status& status, const Output& output) const;

  std::string name_;
  CLI::App app_;
  CommonOptions options_;
  Run run_;  // of the command that was named
};

}  // namespace sqz
