// A layer profile, the JSON file of sqz-profile-layers (docs/format.md): how much the attention of
// each layer of a model changes the hidden state, the groups that follow from it, and the keys that
// each layer gets of a budget.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/base/json.h"
#include "formats/sqz_file.h"

namespace sqz {

struct LayersFile : FileOrigin, LayerBudgets {
  int64_t texts = 0;    // number of texts that were profiled,
  int64_t windows = 0;  // of dense passes over stretches of them,
  int64_t window = 0;   // of tokens in the longest stretch, and
  int64_t tokens = 0;   // in all stretches

  std::vector<double> cosine_error;  // [layers], standard error of `cosine`, >= 0
  std::vector<int64_t> group;        // [layers], 0 (lowest cosines) .. 2 (highest)

  JsonText measured;  // losses on held-out text, for people; null if nothing was measured
};

// The members of the file.
JsonMembers to_json(const LayersFile& layers);

// Publishes by AtomicFile. kInvalidArgument names the field that is out of range, before a file is
// created; kExists if PATH is there and `replace` is false.
Status write_layers_file(Env& env, const std::string& path, bool replace, const LayersFile& layers);

// kCorrupt, naming the field, if a field is missing, unknown or out of range; kUnsupported if the
// file is of a newer version.
Result<LayersFile> read_layers_file(const std::string& path, Env& env = Env::posix());

}  // namespace sqz
