// Capture files (HDF5): the keys, values and queries of one dense pass over a fixed context, as any
// engine can dump them and `sqz-index build --capture` reads them. docs/capture.md has the layout.
//
// Errors of HDF5 become a Status with file, dataset, found and expected. Layers are read one
// at a time, so that only one is in memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "formats/sqz_file.h"

namespace sqz {

// One layer in float32. Queries are those of CaptureInfo::query_positions, after RoPE like `keys`.
struct CapturedLayer {
  std::vector<float> keys;     // [Hkv, N, d]; a recent layer may have the last tokens alone
  std::vector<float> values;   // [Hkv, N, dv]
  std::vector<float> queries;  // [Hq, n, d], or none of a layer that is not full
  std::vector<std::vector<std::byte>> state;  // the bytes of each of CaptureInfo::state
};

struct CaptureInfo {
  ModelDescription model;
  std::string tokenizer_hash;            // empty if unknown
  std::vector<int32_t> tokens;           // [N]
  std::vector<int64_t> query_positions;  // [n], token positions whose queries are stored, ascending
  std::vector<std::vector<StateTensor>> state;  // [layers], by name
};

class CaptureReader {
 public:
  static Result<std::unique_ptr<CaptureReader>> open(const std::string& path);
  virtual ~CaptureReader() = default;
  virtual const CaptureInfo& info() const = 0;
  // Keys are float32, float16 or bfloat16 (uint16 with attribute `dtype` = "bfloat16") in the file.
  virtual Result<CapturedLayer> read_layer(int64_t layer) const = 0;
};

}  // namespace sqz
