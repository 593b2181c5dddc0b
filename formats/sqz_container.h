// What .sqz files of every kind have in common (docs/format.md): a safetensors header with spaces
// up to a page, the hash of that header as the last tensor, checksums, aligned tensors in a fixed
// order. What is in the tensors is the business of the kind: formats/sqz_file.h has indexes,
// formats/layers_file.h layer profiles, formats/qmodel_file.h query classifiers.
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/sqz_layout.h"

namespace sqz {

enum class FileKind { kIndex, kLayers, kQmodel, kQmodelCheckpoint };
// "index", "layers", "qmodel", "qmodel-checkpoint": the metadata's `kind`.
const char* kind_name(FileKind kind);

inline constexpr const char* kChecksumsKey = "checksums";  // of "__metadata__"

// "sqz 0.1.0": this build.
std::string producer_name();

// A file whose header was parsed and agrees with its hash. Movable: `bytes` stays where it is.
struct SqzContainer {
  std::string path;
  std::unique_ptr<ReadFile> file;     // of the mapping; null if the file was read
  std::unique_ptr<Mapping> mapping;   // one of the two holds `bytes`
  std::shared_ptr<std::byte> buffer;  // on a page boundary
  std::span<const std::byte> bytes;   // the whole file
  SafetensorsHeader header;           // with `checksums` in its metadata

  // Empty if there is none of this name.
  std::span<const std::byte> tensor(std::string_view name) const;
};

// kCorrupt or kUnsupported, naming the field, for whatever is no whole file of this kind that this
// build reads. The cost does not grow with the tensors, but in OpenMode::kRead.
Result<SqzContainer> open_container(const std::string& path, FileKind kind, OpenMode mode,
                                    Env& env);

// The file's tensors against the plan: same names, dtypes and shapes in the same order, aligned,
// with paddings between them as it likes. Sets the plan's offsets, from the start of the file.
Status match_tensors(const SafetensorsHeader& header, std::vector<PlannedTensor>& plan,
                     const std::string& path);

// Whether a file says that it is of this kind; false also where it cannot be read.
bool has_kind(const std::string& path, FileKind kind, Env& env);

// What each tensor of a file is to hold, by name.
using TensorContents = std::map<std::string_view, std::span<const std::byte>>;

// Publishes a whole file by AtomicFile and returns its size. `tensors`: sized, in file order, with
// the header's hash last; all but the hash are in `contents`, with as many bytes as planned.
Result<uint64_t> write_container(Env& env, const std::string& path, bool replace,
                                 std::map<std::string, std::string> metadata,
                                 std::vector<PlannedTensor> tensors,
                                 const TensorContents& contents);

// Where the data begin after a header of so many bytes of JSON text.
uint64_t data_start(uint64_t text_bytes);
// The first `data_offset` bytes of a file: length, text, spaces. The text must fit.
std::string sealed_header(std::string text, uint64_t data_offset);

}  // namespace sqz
