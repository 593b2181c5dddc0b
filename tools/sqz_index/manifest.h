// A corpus: a manifest names its documents, each of which becomes one index in a folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/status.h"

namespace sqz {

// A line of the manifest, {"key": K, and one of "texts": [files, folders], "tokens": a file of ids,
// "capture": F.h5}. Paths that are not absolute begin at the manifest's folder.
struct ManifestEntry {
  int64_t line = 0;
  std::string key;  // "a/b": the index is DIR/a/b.sqz
  std::vector<std::string> texts;
  std::string tokens, capture;

  std::string output(const std::string& folder) const;
};

// The documents of a shard, "I/N", which are chosen by the hash of their key: a document that is
// added moves no other. "" is everything. kCorrupt names file and line if a line is not JSON or
// names no document, or if a key is repeated or leads out of the folder. kInvalidArgument if
// `shard` is malformed.
Result<std::vector<ManifestEntry>> read_manifest(const std::string& path, const std::string& shard);

}  // namespace sqz
