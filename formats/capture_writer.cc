#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "formats/base/checked.h"
#include "formats/base/file.h"
#include "formats/capture.h"
#include "formats/hdf5.h"

namespace sqz {
namespace {

constexpr int64_t kChunkRows = 4096;  // 1 MiB of float32 at head_dim 64: HDF5's default chunk cache

constexpr std::string_view kErrno = "errno = ";  // in messages of HDF5

// The bytes of all layers, without cosines.
uint64_t least_bytes(const CaptureInfo& info) {
  uint64_t out = 0;
  for (const CapturePart& part : capture_parts(info, false)) {
    const auto floats = static_cast<uint64_t>(checked_elements(part.shape).value_or(0));
    out += floats * sizeof(float) * static_cast<uint64_t>(info.model.layers);
  }
  return out;
}

// The type of T in memory and in the file.
template <class T>
std::pair<hid_t, hid_t> types() {
  if constexpr (std::is_same_v<T, float>) return {H5T_NATIVE_FLOAT, H5T_IEEE_F32LE};
  if constexpr (std::is_same_v<T, int32_t>) return {H5T_NATIVE_INT32, H5T_STD_I32LE};
  if constexpr (std::is_same_v<T, int64_t>) return {H5T_NATIVE_INT64, H5T_STD_I64LE};
}

class Writer : public CaptureWriter {
 public:
  Writer(std::string path, AtomicFile output, CaptureInfo info)
      : path_(std::move(path)), output_(std::move(output)), info_(std::move(info)) {}

  ~Writer() override {
    const Hdf5Quiet quiet;
    file_.reset();
  }

  Status init() {
    const Hdf5Quiet quiet;
    // The temporary file is there already: HDF5 truncates it and keeps its inode.
    const Hdf5Id access(H5Pcreate(H5P_FILE_ACCESS));
    H5Pset_file_locking(access.get(), false, false);  // not every file system has locks
    file_ = Hdf5Id(
        H5Fcreate(output_.temporary_path().c_str(), H5F_ACC_TRUNC, H5P_DEFAULT, access.get()));
    if (!file_.ok()) return write_error("create");
    const Hdf5Id root(H5Gopen2(file_.get(), "/", H5P_DEFAULT));
    const std::string model = to_json(info_.model).str();
    for (const auto& [name, text] :
         {std::pair{"format", std::string("sqz-capture")}, std::pair{"version", std::string("1")},
          std::pair{"model", model}, std::pair{"tokenizer_hash", info_.tokenizer_hash}}) {
      SQZ_RETURN_IF_ERROR(write_text_attribute(root.get(), path_, name, text));
    }
    const auto count = std::ssize(info_.tokens), queries = std::ssize(info_.query_positions);
    SQZ_ASSIGN_OR_RETURN(Hdf5Id tokens, write_dataset("/tokens", {count}, info_.tokens));
    SQZ_RETURN_IF_ERROR(close(tokens, "/tokens"));
    SQZ_ASSIGN_OR_RETURN(Hdf5Id positions,
                         write_dataset("/query_positions", {queries}, info_.query_positions));
    return close(positions, "/query_positions");
  }

  Status write_layer(int64_t layer, const CapturedLayer& data) override {
    const Hdf5Quiet quiet;
    SQZ_RETURN_IF_ERROR(check(layer, data));
    Hdf5Id keys;  // open to the end: HDF5 lays out a file by when its objects are closed
    for (const CapturePart& part : capture_parts(info_, !data.cosine.empty())) {
      const std::string name = concat("/layers/", layer, "/", part.name);
      SQZ_ASSIGN_OR_RETURN(Hdf5Id set, write_dataset(name, part.shape, data.*part.values));
      if (part.values != &CapturedLayer::keys) {
        SQZ_RETURN_IF_ERROR(close(set, name));
        continue;
      }
      SQZ_RETURN_IF_ERROR(
          write_text_attribute(set.get(), path_, "rope", info_.keys_post_rope ? "post" : "pre"));
      keys = std::move(set);
    }
    written_.push_back(layer);
    return close(keys, concat("/layers/", layer, "/keys"));
  }

  Result<uint64_t> commit() override {
    const Hdf5Quiet quiet;
    if (written_.size() != static_cast<size_t>(info_.model.layers)) {
      return Refuse{path_, Code::kInternal}("layers", written_.size(), info_.model.layers);
    }
    hsize_t bytes = 0;
    if (H5Fflush(file_.get(), H5F_SCOPE_GLOBAL) < 0) return write_error("flush");
    if (H5Fget_filesize(file_.get(), &bytes) < 0) return write_error("file size");
    if (!file_.reset()) return write_error("close");
    SQZ_RETURN_IF_ERROR(output_.commit());
    return bytes;
  }

 private:
  // HDF5 failing to write is the operating system's doing, not the file's. Its message has errno.
  Status write_error(const std::string& call) const {
    const std::string said = hdf5_error(path_, call).message();
    const size_t at = said.find(kErrno);
    if (at == std::string::npos) return {Code::kIo, said};
    return io_error(path_, call, std::atoi(said.c_str() + at + kErrno.size()));
  }

  Status check(int64_t layer, const CapturedLayer& data) const {
    bool sizes = true;
    for (const CapturePart& part : capture_parts(info_, !data.cosine.empty())) {
      sizes = sizes && std::ssize(data.*part.values) == checked_elements(part.shape);
    }
    const bool known = layer >= 0 && layer < info_.model.layers &&
                       std::find(written_.begin(), written_.end(), layer) == written_.end();
    if (sizes && known) return {};
    return {Code::kInternal,
            concat(path_, ": layer ", layer, " of the capture: ",
                   known ? "data of the wrong size" : "out of range or written twice")};
  }

  // HDF5 may write the last chunks of a dataset when it is closed, and tries only once.
  Status close(Hdf5Id& dataset, const std::string& name) const {
    return dataset.reset() ? Status() : write_error("write " + name);
  }

  template <class T>
  Result<Hdf5Id> write_dataset(const std::string& name, const std::vector<int64_t>& shape,
                               const std::vector<T>& data) {
    const Hdf5Id links(H5Pcreate(H5P_LINK_CREATE));
    H5Pset_create_intermediate_group(links.get(), 1);
    const Hdf5Id properties(H5Pcreate(H5P_DATASET_CREATE));
    H5Pset_obj_track_times(properties.get(), false);  // equal input, equal file
    std::vector<hsize_t> dims(shape.begin(), shape.end());
    if (!data.empty()) {
      // One head a chunk, so that a reader may take heads one by one.
      std::vector<hsize_t> chunk = dims;
      if (chunk.size() > 1) chunk.front() = 1;
      hsize_t& rows = chunk.size() > 1 ? chunk[1] : chunk[0];
      rows = std::min<hsize_t>(rows, kChunkRows);
      H5Pset_chunk(properties.get(), static_cast<int>(chunk.size()), chunk.data());
    }
    const auto [memory, file] = types<T>();
    const Hdf5Id space(H5Screate_simple(static_cast<int>(dims.size()), dims.data(), nullptr));
    Hdf5Id dataset(H5Dcreate2(file_.get(), name.c_str(), file, space.get(), links.get(),
                              properties.get(), H5P_DEFAULT));
    if (!dataset.ok()) return write_error("write " + name);
    if (data.empty()) return dataset;
    if (H5Dwrite(dataset.get(), memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, data.data()) < 0) {
      return write_error("write " + name);
    }
    return dataset;
  }

  std::string path_;
  AtomicFile output_;
  Hdf5Id file_;  // closed before output_ removes or publishes the file
  CaptureInfo info_;
  std::vector<int64_t> written_;
};

}  // namespace

Result<std::unique_ptr<CaptureWriter>> CaptureWriter::create(const std::string& path, bool replace,
                                                             const CaptureInfo& info) {
  SQZ_ASSIGN_OR_RETURN(AtomicFile output, AtomicFile::create(Env::posix(), path, replace,
                                                             Temporary::kNamed));  // HDF5 opens it
  SQZ_RETURN_IF_ERROR(Env::posix().check_room(path, least_bytes(info)));
  auto writer = std::make_unique<Writer>(path, std::move(output), info);
  SQZ_RETURN_IF_ERROR(writer->init());
  return std::unique_ptr<CaptureWriter>(std::move(writer));
}

}  // namespace sqz
