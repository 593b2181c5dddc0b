// Writes capture files as another engine does, by HDF5's own functions. The reader refuses a file
// in which one of these calls has failed.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "formats/capture.h"
#include "formats/hdf5.h"

namespace sqz::testing {

// Text of fixed length, padded with zeros.
inline void write_text(hid_t object, const char* name, const std::string& text) {
  const Hdf5Id type(H5Tcopy(H5T_C_S1));
  H5Tset_size(type.get(), text.size() + 1);
  H5Tset_strpad(type.get(), H5T_STR_NULLPAD);
  const Hdf5Id space(H5Screate(H5S_SCALAR));
  const Hdf5Id attribute(
      H5Acreate2(object, name, type.get(), space.get(), H5P_DEFAULT, H5P_DEFAULT));
  H5Awrite(attribute.get(), type.get(), text.c_str());
}

// A dataset, in one piece; its groups are made. Without data it is left unwritten.
inline Hdf5Id write_numbers(hid_t file, const std::string& name, hid_t type,
                            const std::vector<int64_t>& shape, const void* data,
                            hid_t properties = H5P_DEFAULT) {
  const Hdf5Id links(H5Pcreate(H5P_LINK_CREATE));
  H5Pset_create_intermediate_group(links.get(), 1);
  const std::vector<hsize_t> dims(shape.begin(), shape.end());
  const Hdf5Id space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
  Hdf5Id set(
      H5Dcreate2(file, name.c_str(), type, space.get(), links.get(), properties, H5P_DEFAULT));
  if (data != nullptr) H5Dwrite(set.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, data);
  return set;
}

// Replaces a file of this name.
inline void write_capture(const std::string& path, const CaptureInfo& info,
                          const std::function<CapturedLayer(int64_t)>& layer_of) {
  const Hdf5Quiet quiet;
  const Hdf5Id file(H5Fcreate(path.c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, H5P_DEFAULT));
  const Hdf5Id root(H5Gopen2(file.get(), "/", H5P_DEFAULT));
  write_text(root.get(), "model", to_json(info.model).str());
  write_text(root.get(), "tokenizer_hash", info.tokenizer_hash);
  write_numbers(file.get(), "/tokens", H5T_NATIVE_INT32, {std::ssize(info.tokens)},
                info.tokens.data());
  write_numbers(file.get(), "/query_positions", H5T_NATIVE_INT64,
                {std::ssize(info.query_positions)}, info.query_positions.data());
  for (int64_t layer = 0; layer < info.model.layers; ++layer) {
    const CapturedLayer data = layer_of(layer);
    const LayerGeometry own = info.model.layer(layer);
    const int64_t tokens =
        own.has_keys() ? std::ssize(data.keys) / (own.kv_heads * own.head_dim) : 0;
    for (const CapturePart& part : capture_parts(info, layer, tokens)) {
      if (part.values == &CapturedLayer::queries && data.queries.empty()) continue;
      const Hdf5Id set = write_numbers(file.get(), concat("/layers/", layer, "/", part.name),
                                       H5T_IEEE_F32LE, part.shape, (data.*part.values).data());
      if (part.values == &CapturedLayer::keys) write_text(set.get(), "rope", "post");
    }
    for (size_t i = 0; i < data.state.size(); ++i) {  // float32 and int64
      const StateTensor& state = info.state[static_cast<size_t>(layer)][i];
      write_numbers(file.get(), concat("/layers/", layer, "/state/", state.name),
                    state.dtype == DType::kF32 ? H5T_IEEE_F32LE : H5T_STD_I64LE, state.shape,
                    data.state[i].data());
    }
  }
}

}  // namespace sqz::testing
