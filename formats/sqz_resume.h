// The front of an index that is being built and may be gone on with after a kill: in the place of
// the header, what the build depends on, and a record of every layer that is whole. Written before
// the first layer; the header overwrites it at the end. From the top:
//
//   u64 length, JSON text of the settings, u64 XXH3-64 of the text
//   ... and at the end of the room 24 bytes a layer:
//   u64 LayerRecord::input, u64 LayerRecord::output, u64 XXH3-64 of the two
//
// Nothing of it is synced before the end: what a power failure tears does not fit its hashes.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/base/json.h"

namespace sqz {

struct LayerRecord {
  uint64_t input = 0;   // hash of what the layer was made of
  uint64_t output = 0;  // hash of the hashes of its tensors
};

class ResumeFront {
 public:
  // Of a Temporary::kKept file. If it belongs to another build, it begins anew with `replace`, and
  // is otherwise kMismatch, naming the first setting that differs; a file without a whole front
  // begins anew.
  static Result<std::unique_ptr<ResumeFront>> open(Env& env, AtomicFile& file, bool replace,
                                                   const JsonMembers& settings, uint64_t room,
                                                   size_t layers);

  // Whether a layer made of `input` may be whole: its tensors are to be compared with `output`.
  const LayerRecord* find(int64_t layer, uint64_t input) const;
  Status record(AtomicFile& file, int64_t layer, const LayerRecord& record);
  // What was in the file when it was opened. Its reads fail with kCorrupt beyond the end.
  const ReadFile& before() const { return *before_; }

 private:
  uint64_t place(int64_t layer) const;
  Result<std::string> read_settings() const;
  Status read_records();

  uint64_t room_ = 0;
  std::unique_ptr<ReadFile> before_;
  std::vector<LayerRecord> records_;  // of layers without one: zeros
};

}  // namespace sqz
