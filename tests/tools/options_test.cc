// Every option that takes a number with a fraction refuses NaN, which CLI11's own ranges take, and
// --seed what 64 bits do not hold: exit code 2, and one line that names the option and what it
// found.
#include <gmock/gmock.h>

#include <regex>
#include <set>

#include "tests/tools/run_tool.h"

namespace sqz {
namespace {

using ::testing::HasSubstr;

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) out.push_back(line);
  return out;
}

class OptionsTest : public ToolTest, public ::testing::WithParamInterface<const char*> {};

TEST_P(OptionsTest, RefusesWhatIsNoNumber) {
  const std::string tool = GetParam();
  std::vector<std::string> commands;
  bool list = false;
  for (const std::string& line : lines_of(run(tool, {"--help"}).out)) {
    list = line == "Subcommands:" || (list && !line.empty());
    if (list && line.starts_with("  ") && line[2] != ' ') {
      commands.push_back(line.substr(2, line.find(' ', 2) - 2));
    }
  }
  if (commands.empty()) commands.emplace_back();
  const std::regex option("^  (?:-[a-z],)?(--[a-z0-9-]+) (X|S|UINT|FLOAT)\\b");
  int checked = 0;
  bool seed = false;  // a common option: once a tool
  for (const std::string& command : commands) {
    std::vector<std::string> arguments;
    if (!command.empty()) arguments.push_back(command);
    arguments.emplace_back("--help");
    const std::string help = run(tool, arguments).out;
    for (const std::string& line : lines_of(help)) {
      std::smatch found;
      if (!std::regex_search(line, found, option)) continue;
      if (found[1] == "--seed" && std::exchange(seed, true)) continue;
      const std::string value = found[2] == "UINT" ? "99999999999999999999" : "nan";
      arguments.back() = concat(found[1].str(), "=", value);
      const ToolRun refused = run(tool, arguments);
      const std::string said = refused.err.substr(0, refused.err.find('\n'));
      SCOPED_TRACE(concat(tool, " ", command, " ", arguments.back()));
      EXPECT_EQ(refused.code, 2);
      EXPECT_THAT(said, HasSubstr(found[1].str()));
      EXPECT_THAT(said, HasSubstr(value));
      EXPECT_LE(said.size(), 200u) << said;
      EXPECT_EQ(refused.out, "");
      ++checked;
    }
  }
  std::printf("%d options\n", checked);
  EXPECT_GT(checked, 1);
}

INSTANTIATE_TEST_SUITE_P(Tools, OptionsTest,
                         ::testing::Values("sqz-index"
#ifdef SQZ_WITH_TRAINING
                                           ,
                                           "sqz-eval", "sqz-generate", "sqz-profile-layers",
                                           "sqz-train-qmodel"
#endif
                                           ),
                         [](const auto& tool) {
                           std::string name = tool.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace sqz
