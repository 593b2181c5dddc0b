#include "formats/capture.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "formats/hdf5.h"
#include "formats/safetensors.h"
#include "formats/sqz_container.h"
#include "formats/sqz_layout.h"

namespace sqz {
namespace {

const std::string kState = "state/";

std::string layer_path(int64_t layer, const std::string& dataset) {
  return concat("/layers/", layer, "/", dataset);
}

// Fails unless `dataset` has exactly this shape.
Status check_shape(const Hdf5Dataset& dataset, const std::vector<int64_t>& expected,
                   const std::string& meaning) {
  if (dataset.shape == expected) return {};
  return dataset.bad(dataset.shape.empty() ? "no dimensions" : shape_text(dataset.shape),
                     concat(shape_text(expected), ", which is ", meaning));
}

class Reader : public CaptureReader {
 public:
  explicit Reader(std::string path) : path_(std::move(path)) {}

  Status init() {
    const Hdf5Quiet quiet;
    struct stat info {};
    if (::stat(path_.c_str(), &info) != 0) {
      return {errno == ENOENT ? Code::kNotFound : Code::kIo,
              concat(path_, ": open: ", std::strerror(errno))};
    }
    if (!S_ISREG(info.st_mode)) {  // HDF5 would wait for the writer of a pipe
      return {Code::kInvalidArgument, concat(path_, ": not a regular file")};
    }
    file_ = Hdf5Id(H5Fopen(path_.c_str(), H5F_ACC_RDONLY, H5P_DEFAULT));
    if (!file_.ok()) return hdf5_error(path_, "not a readable HDF5 file");
    SQZ_RETURN_IF_ERROR(read_attributes());
    SQZ_RETURN_IF_ERROR(read_tokens());
    SQZ_RETURN_IF_ERROR(read_query_positions());
    for (int64_t layer = 0; layer < info_.model.layers; ++layer) {
      SQZ_RETURN_IF_ERROR(check_layer(layer));
    }
    return {};
  }

  const CaptureInfo& info() const override { return info_; }

  Result<CapturedLayer> read_layer(int64_t layer) const override {
    if (layer < 0 || layer >= info_.model.layers) {
      return Refuse{path_, Code::kInvalidArgument}("layer", layer,
                                                   concat("0 to ", info_.model.layers - 1));
    }
    const auto read = [&]() -> Result<CapturedLayer> {
      const Hdf5Quiet quiet;
      CapturedLayer out;
      for (const CapturePart& part : parts(layer)) {
        SQZ_ASSIGN_OR_RETURN(const Hdf5Dataset dataset, open(layer, part.name));
        SQZ_RETURN_IF_ERROR(
            check_shape(dataset, part.shape, "what the file said when it was opened"));
        SQZ_ASSIGN_OR_RETURN(const DType type, float_type(dataset));
        SQZ_ASSIGN_OR_RETURN(out.*part.values, read_floats(dataset, type));
      }
      for (const StateTensor& state : info_.state[static_cast<size_t>(layer)]) {
        SQZ_ASSIGN_OR_RETURN(const Hdf5Dataset dataset, open(layer, kState + state.name));
        SQZ_RETURN_IF_ERROR(
            check_shape(dataset, state.shape, "what the file said when it was opened"));
        SQZ_ASSIGN_OR_RETURN(out.state.emplace_back(), read_bytes(dataset, state.dtype));
      }
      return out;
    };
    return within_memory(read, path_, ": no memory for layer ", layer);
  }

 private:
  int64_t tokens() const { return std::ssize(info_.tokens); }

  Status read_attributes() {
    const Hdf5Id root(H5Gopen2(file_.get(), "/", H5P_DEFAULT));
    if (!root.ok()) return hdf5_error(path_, "root group");
    SQZ_ASSIGN_OR_RETURN(const auto model, read_text_attribute(root.get(), path_, "model"));
    if (!model) {
      return Refuse{path_}("attribute model", "none",
                           "the model's description as JSON (docs/capture.md)");
    }
    const std::string label = concat(path_, ": attribute model");
    SQZ_ASSIGN_OR_RETURN(const JsonDocument json, parse_json(*model, label));
    SQZ_ASSIGN_OR_RETURN(info_.model, model_from_json(json.root(), label));
    SQZ_ASSIGN_OR_RETURN(const auto hash, read_text_attribute(root.get(), path_, "tokenizer_hash"));
    info_.tokenizer_hash = hash.value_or("");
    if (!hash || hash->empty() || is_hash(*hash)) return {};
    return Refuse{path_}("attribute tokenizer_hash", in_quotes(*hash),
                         "16 hexadecimal digits or none");
  }

  Status read_tokens() {
    SQZ_ASSIGN_OR_RETURN(const Hdf5Dataset dataset, open_dataset(file_.get(), path_, "/tokens"));
    SQZ_ASSIGN_OR_RETURN(const auto values, read_integers(dataset));
    constexpr int64_t kIdLimit = int64_t{1} << 31;
    const int64_t known = info_.model.vocab_size;  // 0: the engine did not say
    const int64_t limit = known == 0 ? kIdLimit : std::min(known, kIdLimit);
    info_.tokens.reserve(values.size());
    for (const int64_t id : values) {
      if (id < 0 || id >= limit) {
        return dataset.bad(concat("id ", id, " at index ", info_.tokens.size()),
                           concat("ids in [0, ", limit, "), the model's vocabulary"));
      }
      info_.tokens.push_back(static_cast<int32_t>(id));
    }
    if (values.empty()) return dataset.bad("no tokens", "at least one");
    return {};
  }

  Status read_query_positions() {
    SQZ_ASSIGN_OR_RETURN(const Hdf5Dataset dataset,
                         open_dataset(file_.get(), path_, "/query_positions"));
    SQZ_ASSIGN_OR_RETURN(info_.query_positions, read_integers(dataset));
    for (size_t i = 0; i < info_.query_positions.size(); ++i) {
      const int64_t position = info_.query_positions[i];
      if (position < 0 || position >= tokens()) {
        return dataset.bad(concat(position, " at index ", i), concat("0 to ", tokens() - 1));
      }
      if (i > 0 && position <= info_.query_positions[i - 1]) {
        return dataset.bad(
            concat(position, " after ", info_.query_positions[i - 1], " at index ", i),
            "ascending positions");
      }
    }
    return {};
  }

  bool has(int64_t layer, const char* dataset) const {
    return H5Lexists(file_.get(), layer_path(layer, dataset).c_str(), H5P_DEFAULT) > 0;
  }

  std::vector<CapturePart> parts(int64_t layer) const {
    auto out = capture_parts(info_, layer, given_[static_cast<size_t>(layer)]);
    const bool full = info_.model.layer(layer).kind == LayerKind::kFull;
    if (!out.empty() && !full && !has(layer, "queries")) out.pop_back();
    return out;
  }

  // The tokens of a layer: all, or of a recent one as many as its keys have.
  Result<int64_t> given_tokens(int64_t layer) const {
    if (info_.model.layer(layer).kind != LayerKind::kRecent) return tokens();
    SQZ_ASSIGN_OR_RETURN(const Hdf5Dataset keys, open(layer, "keys"));
    if (keys.shape.size() != 3) return tokens();
    return std::min(keys.shape[1], tokens());
  }

  // Everything that can be known of a layer without reading its data.
  Status check_layer(int64_t layer) {
    SQZ_ASSIGN_OR_RETURN(given_.emplace_back(), given_tokens(layer));
    std::vector<StateTensor>& state = info_.state.emplace_back();
    for (const std::string& name : names_in(file_.get(), layer_path(layer, "state"))) {
      SQZ_ASSIGN_OR_RETURN(const Hdf5Dataset dataset, open(layer, kState + name));
      if (!is_state_name(name)) {
        return dataset.bad(in_quotes(name), "a name of letters, digits and _");
      }
      SQZ_ASSIGN_OR_RETURN(const DType type, number_type(dataset));
      state.push_back({name, type, dataset.shape});
    }
    for (const CapturePart& part : parts(layer)) {
      SQZ_ASSIGN_OR_RETURN(const Hdf5Dataset dataset, open(layer, part.name));
      SQZ_RETURN_IF_ERROR(check_shape(dataset, part.shape, part.meaning));
      if (part.values == &CapturedLayer::keys) SQZ_RETURN_IF_ERROR(check_rope(dataset));
      SQZ_RETURN_IF_ERROR(float_type(dataset).status());
    }
    return {};
  }

  Status check_rope(const Hdf5Dataset& keys) {
    SQZ_ASSIGN_OR_RETURN(const auto rope, read_text_attribute(keys.id.get(), path_, "rope"));
    if (rope == "post") return {};
    return keys.bad(concat("attribute rope = ", rope ? *rope : "(none)"),
                    "rope = post: an index needs keys after RoPE");
  }

  Result<Hdf5Dataset> open(int64_t layer, const std::string& name) const {
    return open_dataset(file_.get(), path_, layer_path(layer, name));
  }

  std::string path_;
  Hdf5Id file_;
  CaptureInfo info_;
  std::vector<int64_t> given_;  // [layers] tokens of keys and values
};

}  // namespace

std::vector<CapturePart> capture_parts(const CaptureInfo& info, int64_t layer, int64_t tokens) {
  const LayerGeometry own = info.model.layer(layer);
  if (!own.has_keys()) return {};
  const auto queries = std::ssize(info.query_positions);
  return {{"keys",
           &CapturedLayer::keys,
           {own.kv_heads, tokens, own.head_dim},
           "[KV heads, tokens, head_dim]"},
          {"values",
           &CapturedLayer::values,
           {own.kv_heads, tokens, own.value_dim},
           "[KV heads, tokens, value_dim]"},
          {"queries",
           &CapturedLayer::queries,
           {own.query_heads, queries, own.head_dim},
           "[query heads, length of /query_positions, head_dim]"}};
}

Result<std::unique_ptr<CaptureReader>> CaptureReader::open(const std::string& path) {
  const auto open = [&]() -> Result<std::unique_ptr<CaptureReader>> {
    auto reader = std::make_unique<Reader>(path);
    SQZ_RETURN_IF_ERROR(reader->init());
    return std::unique_ptr<CaptureReader>(std::move(reader));
  };
  return within_memory(open, path, ": no memory to open the capture");
}

}  // namespace sqz
