// The common part of .sqz files of every kind (docs/format.md): a safetensors header with spaces up
// to a page, the hash of that header as the last tensor, checksums, aligned tensors in a fixed
// order. Each kind has its own tensors: formats/sqz_file.h has indexes,
// formats/qmodel_file.h query classifiers.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/file.h"
#include "formats/json_fields.h"
#include "formats/model_description.h"
#include "formats/safetensors.h"

namespace sqz {

// Where a file comes from, of every kind.
struct FileOrigin {
  std::string producer;  // "sqz 0.1.0"; empty when written: this build's
  ModelDescription model;
  std::string tokenizer_hash;  // XXH3-64 hex of the tokenizer file; empty if ids were given
};

enum class FileKind { kIndex, kQmodel };
// "index", "qmodel": the metadata's `kind`.
const char* kind_name(FileKind kind);

inline constexpr const char* kChecksumsKey = "checksums";  // of "__metadata__"

// The strings of "__metadata__" as one JSON object, without the checksums: words as strings, every
// other string as the JSON that it holds, or as a string if it holds none.
Result<JsonDocument> metadata_json(const std::map<std::string, std::string>& strings,
                                   const std::string& label);
void read_origin(JsonFields& in, FileOrigin& origin);
// 16 lower-case hexadecimal digits, as XXH3-64 is written.
bool is_hash(const std::string& text);

// A file with a query classifier says what its logits stand for: the attention to one key of a
// bucket (formats/qmodel_file.h). The logits of earlier files, which do not have the key, stood for
// whole buckets.
inline constexpr const char* kLogitsKey = "logits";
inline constexpr const char* kLogitsOfKeys = "key";
// Complains, with `remedy`, of other logits.
void check_logits(JsonFields& in, const char* remedy);

// "sqz 0.1.0": this build.
std::string producer_name();

enum class OpenMode {
  kMmap,    // map the file. A file that is truncated, or a disk that fails, while mapped raises
            // SIGBUS
  kRead,    // read it all into memory at open: no SIGBUS; also for remote disks
  kVerify,  // the same, and verify() of what was read
};

// A file whose header was parsed and agrees with its hash. Movable: `bytes` stays where it is.
struct SqzContainer {
  std::string path;
  std::unique_ptr<ReadFile> file;     // of the mapping; null if the file was read
  std::unique_ptr<Mapping> mapping;   // one of the two holds `bytes`
  std::shared_ptr<std::byte> buffer;  // on a page boundary
  std::span<const std::byte> bytes;   // the whole file
  SafetensorsHeader header;           // with `checksums` in its metadata
  JsonDocument metadata;              // metadata_json() of it

  JsonFields fields() const { return JsonFields(metadata.root(), path + ": __metadata__"); }
  // Empty if there is none of this name.
  std::span<const std::byte> tensor(std::string_view name) const;
};

inline constexpr uint64_t kPage = 4096;     // the data, and the first tensor of every layer
inline constexpr uint64_t kCacheLine = 64;  // every other tensor
inline constexpr const char* kHeaderHashName = "header.xxh3_128";
inline constexpr const char* kPaddingPrefix = "padding.";

// Tensors of older files that nothing reads: curves and codes of single keys.
bool is_unused(std::string_view name);

struct PlannedTensor {
  std::string name;  // says what is in the file
  DType dtype = DType::kU8;
  std::vector<int64_t> shape;
  uint64_t alignment = kCacheLine;
  int64_t layer = -1;   // -1: not of a layer
  uint64_t offset = 0;  // from the start of the data, once placed
  uint64_t bytes = 0;
};

// The tensor that ends every file.
PlannedTensor header_hash_tensor();

// Sets every tensor's bytes from its shape; kInvalidArgument if one overflows.
Status size_tensors(std::vector<PlannedTensor>& tensors, const std::string& label);

// kCorrupt or kUnsupported, naming the field, if the file is not a whole file of this kind and of a
// version that this build reads. In OpenMode::kMmap the cost does not grow with the tensors.
Result<SqzContainer> open_container(const std::string& path, FileKind kind, OpenMode mode,
                                    Env& env);

// Compares the file's tensors with the plan: names, dtypes, shapes, order and alignment. Paddings
// may be anywhere. If the plan itself failed, that is an error of the file, too.
Status match_tensors(const SafetensorsHeader& header,
                     const Result<std::vector<PlannedTensor>>& plan, const std::string& path);

// The checks of all contents of a file, whatever its kind.
class TensorCheck {
 public:
  explicit TensorCheck(const SqzContainer& container) : container_(container) {}

  // Reads the checksums in the metadata: an object of a string for each of some tensors.
  Status init();
  // Compares a tensor with its checksum; paddings must be zeros, and all floats but those of the
  // calibration finite. The header's hash is open_container()'s task. `advance` (may be empty) gets
  // the number of bytes after each step.
  Status run(const TensorInfo& tensor, const std::function<void(size_t)>& advance) const;

 private:
  const SqzContainer& container_;
  std::map<std::string, std::string> checksums_;  // tensor name -> XXH3-64 hex
};
inline constexpr size_t kChecksumChunk = size_t{4} << 20;  // bytes, hashed while in the cache

// Whether a file says that it is of this kind; false also where it cannot be read.
bool has_kind(const std::string& path, FileKind kind, Env& env = Env::posix());

}  // namespace sqz
