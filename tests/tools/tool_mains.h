// main() of every tool, in one library that tests link: a fork() of the test is a run of a tool.
// LibTorch and what it brings take half a second to load, so once a test program instead of once a
// run.
#pragma once

#include <string_view>

namespace sqz {

using ToolMain = int (*)(int argc, char** argv);

// Of "sqz-index" and so on; null for a tool that there is none of.
__attribute__((visibility("default"))) ToolMain tool_main(std::string_view name);

}  // namespace sqz
