// A corpus: a manifest names its documents, each of which becomes one index in a folder.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/base/status.h"

namespace sqz {

// A line of the manifest, {"key": K, and one of "texts": [files, folders], "tokens": F.npy,
// "capture": F.h5}. Paths that are not absolute begin at the manifest's folder.
struct ManifestEntry {
  int64_t line = 0;
  std::string key;  // "a/b": the index is DIR/a/b.sqz
  std::vector<std::string> texts;
  std::string tokens, capture;

  std::string output(const std::string& folder) const;
};

// Part `index` of `count`.
struct Shard {
  int64_t index = 0, count = 1;

  // By the hash of the key: a document that is added moves no other.
  bool holds(const std::string& key) const;
};

// "I/N"; "auto/N": the task of a Slurm array (SLURM_ARRAY_TASK_ID) or the pod of a Kubernetes
// Indexed Job (JOB_COMPLETION_INDEX) of N; "auto": the task of a Slurm array that tells its N. ""
// is everything.
Result<Shard> parse_shard(const std::string& text);

// Those of the shard. kCorrupt names file and line: what is no JSON, a key that
// is repeated or leads out of the folder, a line without a document.
Result<std::vector<ManifestEntry>> read_manifest(const std::string& path, const Shard& shard);

// kInvalidArgument if a link leads from `output` to a place outside of `folder`.
Status check_inside(const std::string& folder, const std::string& output);

}  // namespace sqz
