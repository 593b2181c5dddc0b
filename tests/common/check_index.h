// scripts/check_index.py, the reader that knows docs/format.md alone and recomputes the means.
#pragma once

#include <sys/wait.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "tests/common/temporary_directory.h"

namespace sqz::testing {

// Its exit code for the files (paths between spaces), 0 for whole indexes, and what it prints. -1
// without numpy; SQZ_PYTHON names another Python.
inline std::pair<int, std::string> check_index(const std::string& files) {
  const char* named = std::getenv("SQZ_PYTHON");
  for (const std::string python : {named ? named : "python3", "/usr/bin/python3"}) {
    if (std::system((python + " -c 'import numpy' 2>/dev/null").c_str()) != 0) continue;
    const TemporaryDirectory dir;
    const std::string out = dir.file("out");
    const int code = std::system(
        (python + " " SQZ_SOURCE_DIR "/scripts/check_index.py " + files + " > " + out).c_str());
    return {WEXITSTATUS(code), read_file(out)};
  }
  return {-1, ""};
}

}  // namespace sqz::testing
