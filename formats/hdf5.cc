#include "formats/hdf5.h"

#include <algorithm>
#include <array>

#include "formats/base/checked.h"
#include "formats/safetensors.h"

namespace sqz {
namespace {

constexpr int64_t kMaxText = 16 << 20;           // bytes of a string attribute
constexpr int64_t kMaxChunk = int64_t{1} << 30;  // bytes; HDF5 allocates one chunk at a time
constexpr int64_t kMaxCompression = 1100;        // deflate cannot exceed 1032:1

// The walk goes from the API call inwards: the last description is the most precise.
herr_t keep_last(unsigned, const H5E_error2_t* error, void* out) {
  if (error->desc != nullptr) *static_cast<std::string*>(out) = error->desc;
  return 0;
}

// A callback of HDF5 for links that leave the file: never follow.
herr_t refuse_external_link(const char*, const char*, const char*, const char*, unsigned*, hid_t,
                            void*) {
  return -1;
}

Status unsupported(const Hdf5Dataset& dataset, const std::string& found,
                   const std::string& expected) {
  return Refuse{dataset.file, Code::kUnsupported}(dataset.name, found, expected);
}

Hdf5Id half_type() {
  Hdf5Id type(H5Tcopy(H5T_IEEE_F32LE));
  H5Tset_fields(type.get(), 15, 10, 5, 0, 10);
  H5Tset_size(type.get(), 2);
  H5Tset_ebias(type.get(), 15);
  return type;
}

Status check_layout(const Hdf5Dataset& dataset, hid_t properties, bool& compressed) {
  const H5D_layout_t layout = H5Pget_layout(properties);
  if (layout == H5D_VIRTUAL || H5Pget_external_count(properties) > 0) {
    return unsupported(dataset, "data in other files", "data in this file");
  }
  compressed = H5Pget_nfilters(properties) > 0;
  if (layout != H5D_CHUNKED) return {};
  std::array<hsize_t, H5S_MAX_RANK> chunk{};
  const int rank = H5Pget_chunk(properties, static_cast<int>(chunk.size()), chunk.data());
  if (rank < 0) return hdf5_error(dataset.file, dataset.name);
  const Hdf5Id type(H5Dget_type(dataset.id.get()));
  std::vector<int64_t> sizes = {static_cast<int64_t>(H5Tget_size(type.get()))};
  for (int i = 0; i < rank; ++i) sizes.push_back(static_cast<int64_t>(chunk[i]));
  const auto bytes = checked_elements(sizes);
  if (bytes && *bytes <= kMaxChunk) return {};
  return unsupported(dataset, "a chunk above 1 GiB", "chunks of at most 1 GiB");
}

// HDF5 reads a chunk that nobody has written as zeros.
Status check_chunks(const Hdf5Dataset& dataset, hid_t properties) {
  std::array<hsize_t, H5S_MAX_RANK> chunk{};
  H5Pget_chunk(properties, static_cast<int>(chunk.size()), chunk.data());
  hsize_t needed = 1, found = 0;
  for (size_t i = 0; i < dataset.shape.size(); ++i) {
    needed *= (static_cast<hsize_t>(dataset.shape[i]) + chunk[i] - 1) / chunk[i];
  }
  const Hdf5Id space(H5Dget_space(dataset.id.get()));
  if (H5Dget_num_chunks(dataset.id.get(), space.get(), &found) < 0) {
    return hdf5_error(dataset.file, dataset.name);
  }
  if (found == needed) return {};
  return dataset.bad(concat(found, " chunks"), concat(needed, ", all chunks of its shape"));
}

// The file must hold the data that the shape promises: a shape alone must never make us allocate.
Status check_stored(const Hdf5Dataset& dataset, hid_t file, hid_t properties, bool compressed) {
  const Hdf5Id type(H5Dget_type(dataset.id.get()));
  const auto elements = checked_elements(dataset.shape);
  const auto bytes =
      elements ? checked_mul(*elements, static_cast<int64_t>(H5Tget_size(type.get()))) : elements;
  hsize_t file_bytes = 0;
  if (H5Fget_filesize(file, &file_bytes) < 0) return hdf5_error(dataset.file, "file size");
  const hsize_t stored = H5Dget_storage_size(dataset.id.get());
  const auto limit = checked_mul<uint64_t>(file_bytes, compressed ? kMaxCompression : 1);
  const bool fits = bytes && limit && static_cast<uint64_t>(*bytes) <= *limit;
  if (fits && stored <= file_bytes && (compressed || stored >= static_cast<uint64_t>(*bytes))) {
    return compressed ? check_chunks(dataset, properties) : Status();
  }
  return dataset.bad(concat("shape ", shape_text(dataset.shape), " with ", stored,
                            " bytes stored in a file of ", file_bytes),
                     "a file that holds all elements of the shape");
}

// All elements, each as `each` numbers of T, which `type` describes.
template <class T>
Result<std::vector<T>> read_as(const Hdf5Dataset& dataset, hid_t type, int64_t each = 1) {
  std::vector<T> out(static_cast<size_t>(checked_elements(dataset.shape).value_or(0) * each));
  if (H5Dread(dataset.id.get(), type, H5S_ALL, H5S_ALL, H5P_DEFAULT, out.data()) >= 0) return out;
  return hdf5_error(dataset.file, dataset.name);
}

}  // namespace

Hdf5Quiet::Hdf5Quiet() {
  [[maybe_unused]] static const herr_t once = H5dont_atexit();
  H5Eget_auto2(H5E_DEFAULT, &function_, &data_);
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

Hdf5Quiet::~Hdf5Quiet() {
  H5Eset_auto2(H5E_DEFAULT, function_, data_);
}

Status hdf5_error(const std::string& path, const std::string& what) {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_DOWNWARD, keep_last, &text);
  H5Eclear2(H5E_DEFAULT);
  return {Code::kCorrupt, concat(path, ": ", what, ": HDF5 says: ", text)};
}

Status Hdf5Dataset::bad(const std::string& found, const std::string& expected) const {
  return Refuse{file}(name, found, expected);
}

Result<Hdf5Dataset> open_dataset(hid_t file, const std::string& path, const std::string& name) {
  Hdf5Dataset out;
  out.file = path;
  out.name = name;
  const Hdf5Id access(H5Pcreate(H5P_DATASET_ACCESS));
  H5Pset_elink_cb(access.get(), refuse_external_link, nullptr);
  out.id = Hdf5Id(H5Dopen2(file, name.c_str(), access.get()));
  if (!out.id.ok()) {
    H5Eclear2(H5E_DEFAULT);
    return out.bad("no such dataset", "a dataset");
  }
  const Hdf5Id space(H5Dget_space(out.id.get()));
  std::array<hsize_t, H5S_MAX_RANK> dims{};
  const int rank = H5Sget_simple_extent_dims(space.get(), dims.data(), nullptr);
  if (rank < 0) return hdf5_error(path, name);
  for (int i = 0; i < rank; ++i) {
    const auto dim = checked_cast<int64_t>(dims[i]);
    if (!dim) return out.bad(concat("a dimension of ", dims[i]), "at most 2^63 - 1");
    out.shape.push_back(*dim);
  }
  const Hdf5Id properties(H5Dget_create_plist(out.id.get()));
  bool compressed = false;
  SQZ_RETURN_IF_ERROR(check_layout(out, properties.get(), compressed));
  SQZ_RETURN_IF_ERROR(check_stored(out, file, properties.get(), compressed));
  return out;
}

Result<DType> float_type(const Hdf5Dataset& dataset) {
  const Hdf5Id type(H5Dget_type(dataset.id.get()));
  if (H5Tequal(type.get(), H5T_IEEE_F32LE) > 0) return DType::kF32;
  if (H5Tequal(type.get(), half_type().get()) > 0) return DType::kF16;
  if (H5Tequal(type.get(), H5T_STD_U16LE) > 0) {
    SQZ_ASSIGN_OR_RETURN(const auto dtype,
                         read_text_attribute(dataset.id.get(), dataset.file, "dtype"));
    if (dtype == "bfloat16") return DType::kBF16;
    return dataset.bad(concat("uint16 with attribute dtype = ", dtype ? *dtype : "(none)"),
                       "attribute dtype = bfloat16");
  }
  return dataset.bad(concat("another element type of ", H5Tget_size(type.get()), " bytes"),
                     "little-endian float32, float16, or uint16 with dtype = bfloat16");
}

Result<DType> number_type(const Hdf5Dataset& dataset) {
  const Hdf5Id type(H5Dget_type(dataset.id.get()));
  const auto is = [&](hid_t known) { return H5Tequal(type.get(), known) > 0; };
  const std::pair<hid_t, DType> known[] = {
      {H5T_STD_U8LE, DType::kU8},   {H5T_STD_I8LE, DType::kI8},   {H5T_STD_I16LE, DType::kI16},
      {H5T_STD_U32LE, DType::kU32}, {H5T_STD_I32LE, DType::kI32}, {H5T_STD_U64LE, DType::kU64},
      {H5T_STD_I64LE, DType::kI64}, {H5T_IEEE_F64LE, DType::kF64}};
  for (const auto& [hdf5, dtype] : known) {
    if (is(hdf5)) return dtype;
  }
  const bool plain = is(H5T_STD_U16LE) && H5Aexists(dataset.id.get(), "dtype") <= 0;
  return plain ? Result<DType>(DType::kU16) : float_type(dataset);
}

Result<std::vector<std::byte>> read_bytes(const Hdf5Dataset& dataset, DType type) {
  const Hdf5Id stored(H5Dget_type(dataset.id.get()));
  return read_as<std::byte>(dataset, stored.get(), dtype_size(type));
}

std::vector<std::string> names_in(hid_t file, const std::string& group) {
  std::vector<std::string> out;
  const Hdf5Id id(H5Gopen2(file, group.c_str(), H5P_DEFAULT));
  H5Eclear2(H5E_DEFAULT);
  H5G_info_t info{};
  if (!id.ok() || H5Gget_info(id.get(), &info) < 0) return out;
  for (hsize_t i = 0; i < info.nlinks; ++i) {
    char name[256] = {};
    H5Lget_name_by_idx(id.get(), ".", H5_INDEX_NAME, H5_ITER_INC, i, name, sizeof(name) - 1,
                       H5P_DEFAULT);
    out.emplace_back(name);
  }
  return out;
}

Result<std::vector<int64_t>> read_integers(const Hdf5Dataset& dataset) {
  const Hdf5Id type(H5Dget_type(dataset.id.get()));
  if (H5Tget_class(type.get()) != H5T_INTEGER || H5Tget_size(type.get()) > sizeof(int64_t)) {
    return dataset.bad("another element type", "integers of at most 64 bits");
  }
  if (dataset.shape.size() != 1) return dataset.bad(shape_text(dataset.shape), "one dimension");
  return read_as<int64_t>(dataset, H5T_NATIVE_INT64);
}

Result<std::vector<float>> read_floats(const Hdf5Dataset& dataset, DType type) {
  if (type == DType::kF32) return read_as<float>(dataset, H5T_NATIVE_FLOAT);
  SQZ_ASSIGN_OR_RETURN(const auto bytes, read_bytes(dataset, type));
  std::vector<float> out(bytes.size() / 2);
  to_floats(bytes.data(), type, std::ssize(out), out.data());
  return out;
}

Result<std::optional<std::string>> read_text_attribute(hid_t object, const std::string& path,
                                                       const std::string& name) {
  const std::string label = "attribute " + name;
  const auto bad = [&](const std::string& found) { return Refuse{path}(label, found, "text"); };
  if (H5Aexists(object, name.c_str()) <= 0) {
    H5Eclear2(H5E_DEFAULT);
    return std::optional<std::string>();
  }
  const Hdf5Id attribute(H5Aopen(object, name.c_str(), H5P_DEFAULT));
  if (!attribute.ok()) return hdf5_error(path, label);
  const Hdf5Id type(H5Aget_type(attribute.get()));
  const Hdf5Id space(H5Aget_space(attribute.get()));
  if (H5Tget_class(type.get()) != H5T_STRING) return bad("another type");
  if (H5Sget_simple_extent_npoints(space.get()) != 1) return bad("several values");

  if (H5Tis_variable_str(type.get()) > 0) {
    char* text = nullptr;
    if (H5Aread(attribute.get(), type.get(), &text) < 0) return hdf5_error(path, label);
    std::optional<std::string> out(text != nullptr ? text : "");
    H5free_memory(text);
    return out;
  }
  const size_t size = H5Tget_size(type.get());
  if (size > kMaxText) return bad(concat(size, " bytes"));
  std::string out(size, '\0');
  if (H5Aread(attribute.get(), type.get(), out.data()) < 0) return hdf5_error(path, label);
  out.resize(out.find_last_not_of('\0') + 1);  // fixed-length text is padded with zeros
  return std::optional<std::string>(std::move(out));
}

}  // namespace sqz
