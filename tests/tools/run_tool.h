// Runs a tool as a user would: arguments, environment and standard input in; exit code, standard
// output and standard error out (files, so neither is a terminal). The name of a tool ("sqz-index")
// is its main() in a process of its own. A path is a program that is started.
//
// Most calls are rows of a table, a command and what it must answer (ToolCase):
//
//   expect_all({{"sqz-index info a.sqz", 0, {"tokens", "build.engine"}},
//               {"sqz-index info none.sqz", 3, {"none.sqz"}}});
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cctype>
#include <chrono>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "tests/common/json.h"
#include "tests/common/temporary_directory.h"
#include "tests/tools/tool_mains.h"

namespace sqz {

struct ToolRun {
  int code = -1;  // exit code, or 128 + the signal that ended it, as in a shell
  std::string out, err;

  // stdout, one JSON object a line; the test fails where a line is something else.
  std::vector<Json> events() const {
    std::vector<Json> all;
    std::istringstream lines(out);
    for (std::string line; std::getline(lines, line);) {
      const auto json = parse_json(line, "stdout");  // strict: no key twice
      EXPECT_TRUE(json.ok() && json->root().is_object()) << line;
      if (json.ok()) all.push_back(Json::parse(line));
    }
    return all;
  }
  // The last event, which must be of this kind.
  Json last(const std::string& kind = "result") const {
    const auto all = events();
    if (all.empty() || all.back().value("event", "") != kind) {
      ADD_FAILURE() << "no " << kind << " at the end\nstdout: " << out << "\nstderr: " << err;
      return Json::object();
    }
    return all.back();
  }
};

struct ToolCase {
  // The tool and its arguments, separated by spaces. 'Words in quotes' stay together, and $NAME is
  // replaced by ToolTest::variables. Relative paths are in the test's folder. --json is added.
  std::string command;
  int code = 0;
  // Keys of the result ("budget.delivered") if the code is 0, else parts of the error message.
  std::vector<std::string> parts;
  std::string input;
};

using testing::read_file;
using testing::write_file;

inline const std::string kModel = SQZ_SOURCE_DIR "/examples/models/nano";

// About `words` words of prose, the same every time.
inline std::string prose(int words) {
  const char* vocabulary[] = {"the",  "house", "was",  "silent", "and",   "old", "road",  "by",
                              "sea",  "they",  "went", "slowly", "under", "a",   "heavy", "sky",
                              "with", "no",    "word", "spoken", "until", "it",  "grew",  "dark"};
  std::string out;
  uint32_t state = 12345;
  for (int i = 0; i < words; ++i) {
    state = state * 1664525u + 1013904223u;
    out += vocabulary[(state >> 16) % std::size(vocabulary)];
    out += i % 13 == 12 ? ".\n" : " ";
  }
  return out;
}

// A folder for a test's files, removed at the end.
class ToolTest : public ::testing::Test {
 protected:
  ToolTest() { std::filesystem::create_directories(folder_ / "work"); }

  // A path in the test's own folder, where a tool works; scratch files of run() lie elsewhere.
  std::string path(const std::string& name) const { return (folder_ / "work" / name).string(); }

  // A file for --tokens.
  void write_ids(const std::string& name, const std::vector<int32_t>& ids) const {
    std::string text;
    for (const int32_t id : ids) text += concat(id, "\n");
    write_file(path(name), text);
  }

  // Names in the folder, sorted, one a line: what a tool left behind.
  std::string files() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_ / "work")) {
      names.push_back(entry.path().lexically_relative(folder_ / "work").string());
    }
    std::sort(names.begin(), names.end());
    std::string out;
    for (const auto& name : names) out += name + "\n";
    return out;
  }

  // `while_running` is called with the process once it has been started.
  ToolRun run(const std::string& tool, std::vector<std::string> arguments,
              const std::string& input = "", std::vector<std::string> environment = {},
              const std::function<void(pid_t)>& while_running = {}) const {
    const std::string in = (folder_ / "stdin").string(), out = (folder_ / "stdout").string(),
                      err = (folder_ / "stderr").string();
    write_file(in, input);
    write_file(err, "");
    std::vector<char*> argv = {const_cast<char*>(tool.c_str())};
    for (auto& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    const bool program = tool.find('/') != std::string::npos;
    const ToolMain main = program ? nullptr : tool_main(tool);
    EXPECT_TRUE(program || main) << "no tool " << tool;
    std::fflush(nullptr);
    const pid_t child = ::fork();
    if (child == 0) {
      std::filesystem::current_path(folder_ / "work");
      for (auto& variable : environment) ::putenv(variable.data());
      const bool ready = std::freopen(in.c_str(), "r", stdin) &&
                         std::freopen(out.c_str(), "w", stdout) &&
                         std::freopen(err.c_str(), "w", stderr);
      ::signal(SIGINT, SIG_DFL);
      ::signal(SIGHUP, SIG_DFL);
      if (ready && program) ::execv(tool.c_str(), argv.data());
      if (!ready || !main) ::_exit(127);
      ::setenv("OMP_WAIT_POLICY", "passive", 0);  // else the tool would start the test again
      const int code = [&]() noexcept {
        return main(static_cast<int>(arguments.size()) + 1, argv.data());
      }();
      std::fflush(nullptr);
      ::_exit(code);  // what the test has to do at its end is its own
    }
    if (while_running) while_running(child);
    int status = 0;
    ::waitpid(child, &status, 0);
    ToolRun result;
    result.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    result.out = read_file(out);
    result.err = read_file(err);
    return result;
  }

  // Runs a case and checks its answer. Returns the result, or the error.
  Json expect(const ToolCase& wanted) const {
    SCOPED_TRACE(wanted.command);
    std::vector<std::string> words = words_of(wanted.command);
    const std::string tool = words.front();
    words.erase(words.begin());
    words.emplace_back("--json");
    const ToolRun found = run(tool, words, wanted.input);
    EXPECT_EQ(found.code, wanted.code) << found.out << found.err;
    if (found.code != wanted.code) return Json::object();
    const Json last = found.last(wanted.code == 0 ? "result" : "error");
    for (const std::string& part : wanted.parts) {
      if (wanted.code == 0) {
        std::string pointer = "/" + part;
        std::replace(pointer.begin(), pointer.end(), '.', '/');
        EXPECT_TRUE(last.contains(Json::json_pointer(pointer))) << "no " << part << " in " << last;
      } else {
        const std::string said = last.value("message", "");
        EXPECT_NE(said.find(part), std::string::npos) << "no \"" << part << "\" in: " << said;
        EXPECT_NE(found.err.find(part), std::string::npos) << found.err;
      }
    }
    return last;
  }
  void expect_all(const std::vector<ToolCase>& cases) const {
    for (const ToolCase& one : cases) expect(one);
  }

  // The words of a ToolCase::command.
  std::vector<std::string> words_of(const std::string& command) const {
    std::vector<std::string> words;
    bool quoted = false, open = false;
    for (size_t i = 0; i < command.size(); ++i) {
      const char c = command[i];
      if (c == '\'') {
        quoted = !quoted;
      } else if (c == ' ' && !quoted) {
        open = false;
        continue;
      }
      if (!open) words.emplace_back();
      open = true;
      if (c == '\'') continue;
      if (c != '$') {
        words.back() += c;
        continue;
      }
      size_t end = i + 1;
      while (end < command.size() && std::isupper(static_cast<unsigned char>(command[end]))) ++end;
      words.back() += variables.at(command.substr(i + 1, end - i - 1));
      i = end - 1;
    }
    return words;
  }

  std::map<std::string, std::string> variables = {{"MODEL", kModel}};

  // The tool that runs just now has written to its standard error: with --progress, that it works,
  // and is ready for signals.
  bool has_spoken() const { return !read_file(folder_ / "stderr").empty(); }

  const testing::TemporaryDirectory directory_;
  std::filesystem::path folder_ = std::filesystem::canonical(directory_.path());  // it exists
};

// Sends `signal` as soon as `ready()` is true. Gives up, without sending, when the process ends.
inline void signal_when(pid_t child, int signal, const std::function<bool()>& ready) {
  while (!ready()) {
    siginfo_t info = {};
    if (::waitid(P_PID, static_cast<id_t>(child), &info, WEXITED | WNOHANG | WNOWAIT) == 0 &&
        info.si_pid == child) {
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  ::kill(child, signal);
}

}  // namespace sqz
