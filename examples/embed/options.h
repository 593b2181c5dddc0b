// The options of embed: command line, then environment (SQZ_BUDGET for --budget), then INI file;
// the first that has an option wins.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "sqz/sqz.h"

namespace embed {

struct Options {
  std::string index;
  std::string capture;          // queries of all layers from a capture file (HDF5) ...
  std::string format = "text";  // ... or of one layer from standard input: "text" or "f32"
  int64_t layer = -1;           // to serve; -1: all of a capture, 0 from standard input
  bool compare = false;         // also densely, and print how far the two are apart
  bool read = false;            // read the index into memory instead of mapping it
  sqz_session_options session = {};
};

// Nothing if --help was asked for and printed. Throws std::exception with a sentence for people.
std::optional<Options> parse_options(int argc, const char* const* argv);

}  // namespace embed
