// The frame of all tools: common options, --help, logging, signals, and the exit code of a Status.
//
//   int main(int argc, char** argv) {
//     sqz::Tool tool("sqz-index", "Builds ...", "Result: ...\n\nExamples: ...");
//     CLI::App* build = tool.command("build", "...", "...", [&](const ToolContext&) { ... });
//     build->add_option(...);
//     return tool.run(argc, argv);
//   }
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "formats/base/status.h"
#include "tools/common/output.h"
#include "tools/common/progress.h"

namespace sqz {

enum ExitCode : int {
  kExitOk = 0,
  kExitError = 1,     // the operating system refused, an output exists, or a bug
  kExitUsage = 2,     // options that cannot be used, together, with this input or on this machine
  kExitBadInput = 3,  // an input file is missing, broken, unsupported or of another model
};
int exit_code(const Status& status);

struct CommonOptions {
  bool json = false;
  int quiet = 0;  // 1: no messages but errors, and results; 2: nothing
  bool verbose = false;
  int threads = 0;  // after parsing: from 1 to the cores that this process may use
  uint64_t seed = 0;
  std::string device = "cpu";  // or "cuda", "cuda:N"
  std::optional<bool> progress;

  std::optional<int> gpu() const;  // number of the CUDA device; none: the CPU
};

struct ToolContext {
  CommonOptions options;
  Output output;

  ProgressStyle progress_style() const;
};

// The threads that run: 0 stands for all cores, by affinity and quota, and more than these is
// warned of and is these.
int limited_threads(int asked);

// Accepts whole numbers from `least` to 2^31. --help does not print the range.
CLI::Validator whole_number(int64_t least);

// Accepts numbers from `least` to `most`, and no NaN. --help prints the range.
CLI::Validator real_number(double least, double most);

// Accepts a CommonOptions::device.
CLI::Validator device_name();

// While it lives, new options stand in this section of --help, with their defaults.
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

  // `notes` stands at the end of --help, but its part from "Examples:" on stands in front of the
  // options.
  Tool(const std::string& name, const std::string& description, const std::string& notes);

  // Adds a subcommand. The caller adds its own options to the result.
  CLI::App* command(const std::string& name, const std::string& description,
                    const std::string& notes, Run run);
  // For a tool without subcommands.
  CLI::App* only_command(Run run);

  // Parses, runs, and returns the exit code. Catches all exceptions. `sleeping_openmp`: OpenMP's
  // threads sleep while they wait for work. The libraries are loaded twice then, so this is for
  // tools that work for minutes.
  int run(int argc, char** argv, bool sleeping_openmp = false);

 private:
  void set_notes(CLI::App& app, const std::string& notes);
  void add_common_options(CLI::App& app);
  int parse(int argc, char** argv, bool& done);
  std::string problem(const CLI::ParseError& error) const;
  int finish(const Status& status, const Output& output) const;
  void say_error(const Status& status) const;

  std::string name_;
  CLI::App app_;
  CLI::App* chosen_;  // the command that was named, or app_
  CommonOptions options_;
  Run run_;  // of the command that was named
};

}  // namespace sqz
