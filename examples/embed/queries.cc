#include "queries.h"

#include <hdf5.h>

#include <cstring>
#include <iterator>
#include <stdexcept>

namespace {

// An HDF5 identifier and how it is closed.
class Handle {
 public:
  Handle(hid_t id, herr_t (*close)(hid_t), const std::string& what) : id_(id), close_(close) {
    if (id < 0) throw std::runtime_error(what);
  }
  ~Handle() { close_(id_); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;
  hid_t get() const { return id_; }

 private:
  hid_t id_;
  herr_t (*close_)(hid_t);
};

// HDF5 turns every float type into float32, but bfloat16 is stored as uint16.
std::vector<float> read_dataset(hid_t set, size_t count, const std::string& label) {
  const Handle type(H5Dget_type(set), H5Tclose, label + ": no type");
  const bool floats = H5Tget_class(type.get()) == H5T_FLOAT;
  std::vector<float> out(count);
  std::vector<uint16_t> bits(floats ? 0 : count);
  void* const into = floats ? static_cast<void*>(out.data()) : bits.data();
  if (H5Dread(set, floats ? H5T_NATIVE_FLOAT : H5T_NATIVE_UINT16, H5S_ALL, H5S_ALL, H5P_DEFAULT,
              into) < 0) {
    throw std::runtime_error(label + ": cannot be read");
  }
  for (size_t i = 0; i < bits.size(); ++i) {
    const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
    std::memcpy(&out[i], &wide, sizeof(wide));
  }
  return out;
}

}  // namespace

std::vector<float> read_queries(std::istream& in, int64_t heads, int64_t dim) {
  std::vector<float> out{std::istream_iterator<float>(in), {}};
  if (in.eof() && !out.empty() && out.size() % static_cast<size_t>(heads * dim) == 0) return out;
  throw std::runtime_error("standard input: found " + std::to_string(out.size()) +
                           (in.eof() ? " numbers" : " numbers and then another word") +
                           ", expected a multiple of " + std::to_string(heads * dim));
}

std::vector<float> read_capture(const std::string& path, int64_t layer, int64_t heads,
                                int64_t dim) {
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);  // no messages of its own on stderr
  const std::string name = "/layers/" + std::to_string(layer) + "/queries";
  const std::string label = path + ": " + name;
  const Handle file(H5Fopen(path.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT), H5Fclose,
                    path + ": cannot be opened as HDF5");
  const Handle set(H5Dopen2(file.get(), name.c_str(), H5P_DEFAULT), H5Dclose,
                   label + ": not found");
  const Handle space(H5Dget_space(set.get()), H5Sclose, label + ": no shape");
  hsize_t shape[3] = {};
  const bool three = H5Sget_simple_extent_ndims(space.get()) == 3;
  if (three) H5Sget_simple_extent_dims(space.get(), shape, nullptr);
  const auto h = static_cast<hsize_t>(heads), d = static_cast<hsize_t>(dim);
  if (!three || shape[0] != h || shape[2] != d || shape[1] == 0 || shape[1] > (1u << 20)) {
    throw std::runtime_error(label + ": expected the shape [" + std::to_string(heads) +
                             ", 1 or more, " + std::to_string(dim) + "] of the index");
  }
  const std::vector<float> by_head = read_dataset(set.get(), h * shape[1] * d, label);
  std::vector<float> out(by_head.size());  // [T, heads, dim]
  for (hsize_t head = 0; head < h; ++head) {
    for (hsize_t t = 0; t < shape[1]; ++t) {
      std::memcpy(&out[(t * h + head) * d], &by_head[(head * shape[1] + t) * d], d * sizeof(float));
    }
  }
  return out;
}
