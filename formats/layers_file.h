// A layer profile, the .sqz file of kind `layers` (docs/format.md): how much the attention of each
// layer of a model changes the hidden state, the groups that follow, and the keys that each layer
// gets of a budget. The file is small; reading it checks everything.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/base/json.h"
#include "formats/sqz_file.h"

namespace sqz {

struct LayersFile : FileOrigin, LayerBudgets {
  int64_t texts = 0;    // what was profiled: number of texts,
  int64_t windows = 0;  // dense passes over stretches of them,
  int64_t window = 0;   // tokens of a stretch at most, and
  int64_t tokens = 0;   // of all of them

  std::vector<double> cosine_error;  // [layers], standard error of `cosine`, >= 0
  std::vector<int32_t> group;        // [layers], 0 (lowest cosines) .. 2 (highest), none empty

  JsonText
      measured;  // what budgets cost on held-out text, for people; null if nothing was measured
};

// Publishes by AtomicFile; returns the file's size. kInvalidArgument names what is out of range,
// before a file is created; kExists if PATH is there and `replace` is false.
Result<uint64_t> write_layers_file(Env& env, const std::string& path, bool replace,
                                   LayersFile layers);

// kCorrupt or kUnsupported for what is no whole layer profile: the sentence names the field.
Result<LayersFile> read_layers_file(const std::string& path, Env& env = Env::posix());

// All that is wrong with the contents of a file whose header is right.
Result<VerifyReport> verify_layers_file(const std::string& path, Env& env = Env::posix());

}  // namespace sqz
