// Captures whose parts come from the input, legal or not: opened and every layer read, or refused.
// HDF5 writes them, since it cannot be trusted to read a file that is damaged (docs/capture.md).
//
// Input: the attribute `model` up to a zero byte, then five numbers and more for each dataset.
#include <hdf5.h>

#include <algorithm>
#include <cstdint>

#include "formats/hdf5.h"
#include "tests/common/capture_file.h"
#include "tests/common/temporary_directory.h"

namespace {

using sqz::Hdf5Id, sqz::testing::write_numbers, sqz::testing::write_text;

struct Bytes {
  std::span<const uint8_t> rest;
  uint8_t next() {
    const uint8_t byte = rest.empty() ? 0 : rest[0];
    rest = rest.subspan(std::min<size_t>(1, rest.size()));
    return byte;
  }
};

// A dataset with elements 0, step, 2 step, ...
void write(hid_t file, const std::string& name, Bytes& in) {
  const hid_t types[] = {H5T_IEEE_F32LE, H5T_STD_U16LE, H5T_STD_I32LE,  H5T_STD_I64LE,
                         H5T_STD_U8LE,   H5T_STD_U64BE, H5T_IEEE_F64LE, H5T_C_S1};
  const hid_t type = types[in.next() % std::size(types)];
  const uint8_t how = in.next(), step = in.next();
  std::vector<int64_t> dims(in.next() % 4);
  for (int64_t& dim : dims) dim = in.next() % 32;
  int64_t count = 1;
  for (const int64_t dim : dims) count *= dim;
  std::vector<int64_t> data(static_cast<size_t>(count));
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<int64_t>(i) * step - (how >> 6);
  const Hdf5Id properties(H5Pcreate(H5P_DATASET_CREATE));
  if ((how & 1) && count > 0 && !dims.empty()) {
    const std::vector<hsize_t> chunk(dims.begin(), dims.end());
    H5Pset_chunk(properties.get(), static_cast<int>(chunk.size()), chunk.data());
    H5Pset_deflate(properties.get(), 1);
  }
  const Hdf5Id set = write_numbers(file, name, type, dims, nullptr, properties.get());
  if (!set.ok()) return;
  if (!(how & 2) && type != H5T_C_S1) {
    H5Dwrite(set.get(), H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, data.data());
  }
  if (how & 4) write_text(set.get(), "dtype", "bfloat16");
  if (how & 8) write_text(set.get(), "rope", how & 16 ? "pre" : "post");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const sqz::Hdf5Quiet quiet;
  static const sqz::testing::TemporaryDirectory directory;
  const std::string path = directory.file("x.h5");
  {
    const Hdf5Id file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
    const Hdf5Id root(H5Gopen2(file.get(), "/", H5P_DEFAULT));
    const uint8_t* end = std::find(data, data + size, uint8_t{0});
    write_text(root.get(), "model", std::string(data, end));
    Bytes in{{end, data + size}};
    in.next();
    write(file.get(), "/tokens", in);
    write(file.get(), "/query_positions", in);
    for (int layer = 0; layer < 2 && !in.rest.empty(); ++layer) {
      for (const char* name : {"keys", "values", "queries", "state/s"}) {
        if (!in.rest.empty()) write(file.get(), sqz::concat("/layers/", layer, "/", name), in);
      }
    }
  }
  const auto capture = sqz::CaptureReader::open(path);
  if (!capture.ok()) return 0;
  for (int64_t layer = 0; layer < (*capture)->info().model.layers; ++layer) {
    if (!(*capture)->read_layer(layer).ok()) break;
  }
  return 0;
}
