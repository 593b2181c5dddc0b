// The part of HDF5's C API that capture files need: handles that close themselves, errors as
// Status, and checks of a dataset against the file before a byte is allocated for it. Private to
// sqz_capture.
//
// HDF5 prints its errors to stderr by default; Hdf5Quiet silences that, and hdf5_error() puts the
// innermost message of HDF5's error stack into ours. HDF5 as Debian builds it is not thread-safe:
// one thread at a time may use any of this.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "formats/base/dtype.h"
#include "formats/base/status.h"
#include "formats/capture.h"

namespace sqz {

// A dataset of each layer, "/layers/N/NAME".
struct CapturePart {
  const char* name;
  std::vector<float> CapturedLayer::*values;
  std::vector<int64_t> shape;
  const char* meaning;  // of the shape
};
// A layer without keys has no parts. tokens: how many of them the layer has.
std::vector<CapturePart> capture_parts(const CaptureInfo& info, int64_t layer, int64_t tokens);

// An HDF5 identifier of any kind; negative means "none".
class Hdf5Id {
 public:
  Hdf5Id() = default;
  explicit Hdf5Id(hid_t id) : id_(id) {}
  Hdf5Id(Hdf5Id&& other) noexcept : id_(std::exchange(other.id_, -1)) {}
  Hdf5Id& operator=(Hdf5Id&& other) noexcept {
    std::swap(id_, other.id_);
    return *this;
  }
  ~Hdf5Id() {
    if (id_ >= 0) H5Idec_ref(id_);  // closes, whatever it is
  }

  hid_t get() const { return id_; }
  bool ok() const { return id_ >= 0; }

 private:
  hid_t id_ = -1;
};

// Silences HDF5's printing while it lives, and turns off HDF5's work at the end of the process, so
// each reader has to close its file.
class Hdf5Quiet {
 public:
  Hdf5Quiet();
  ~Hdf5Quiet();

 private:
  H5E_auto2_t function_ = nullptr;
  void* data_ = nullptr;
};

// kCorrupt: "PATH: WHAT: <HDF5's innermost message>". Clears HDF5's error stack.
Status hdf5_error(const std::string& path, const std::string& what);

// A dataset opened for reading. Its shape is checked against what the file really stores.
struct Hdf5Dataset {
  std::string file;  // path of the file, for messages
  std::string name;  // "/layers/0/keys"
  Hdf5Id id;
  std::vector<int64_t> shape;

  // kCorrupt "FILE: NAME: ..." with these ends.
  Status bad(const std::string& found, const std::string& expected) const;
};

// Opens `name`. Refuses a missing dataset; external files, virtual datasets and links that leave
// the file; and dimensions whose bytes the file does not hold. Uncompressed data must be stored
// whole; compressed data may be 1100 times larger than the file, which is more than deflate can
// reach.
Result<Hdf5Dataset> open_dataset(hid_t file, const std::string& path, const std::string& name);

// The element type of a dataset of floats: F32, F16, or BF16 for uint16 with the attribute
// `dtype` = "bfloat16". Little-endian only; anything else is an error.
Result<DType> float_type(const Hdf5Dataset& dataset);

// The element type of any dataset of numbers; of two bytes without sign as float_type() says, or
// U16.
Result<DType> number_type(const Hdf5Dataset& dataset);
// All bytes, little-endian, in the dataset's order. `type` is number_type()'s answer.
Result<std::vector<std::byte>> read_bytes(const Hdf5Dataset& dataset, DType type);

// Names in a group, ascending; none if there is no such group.
std::vector<std::string> names_in(hid_t file, const std::string& group);

// [count] integers of any width, in one read.
Result<std::vector<int64_t>> read_integers(const Hdf5Dataset& dataset);

// All elements as float32, in the dataset's order. `type` is float_type()'s answer.
Result<std::vector<float>> read_floats(const Hdf5Dataset& dataset, DType type);

// The text of a string attribute, of fixed or variable length; empty if there is none.
Result<std::optional<std::string>> read_text_attribute(hid_t object, const std::string& path,
                                                       const std::string& name);

}  // namespace sqz
