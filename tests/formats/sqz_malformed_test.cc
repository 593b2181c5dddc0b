// Malformed .sqz files, whose header's hash is right: what a wrong writer, or a clever one, would
// make. Each is refused when it is opened, in a sentence with the file and the field.
#include <algorithm>

#include "formats/qmodel_file.h"
#include "formats/sqz_file.h"
#include "tests/formats/raw_safetensors.h"
#include "tests/formats/schema.h"
#include "tests/fuzz/memory_env.h"

namespace sqz {
namespace {

using testing::expect_refused;
using testing::Field;
using testing::RawIndex;
using testing::Type;

constexpr double kU32 = UINT32_MAX, kInt64 = 9e18;

const Field kModel[] = {
    {"/model/architecture", Type::kText},
    {"/model/layers", Type::kInteger, 1, 65536},
    {"/model/query_heads", Type::kInteger, 1, 65536},
    {"/model/kv_heads", Type::kInteger, 1, 1},  // at most query_heads
    {"/model/head_dim", Type::kInteger, 1, 4096},
    {"/model/hidden_size", Type::kInteger, 0, kInt64},
    {"/model/vocab_size", Type::kInteger, 0, kInt64},
    {"/model/max_positions", Type::kInteger, 0, kInt64},
    {"/model/attention_scale", Type::kNumber, 0, 1e300},
    {"/model/weights_hash", Type::kText},
    {"/model/sliding_window", Type::kRow},
    {"/model/sliding_window/0", Type::kInteger, 0, kInt64},
    {"/model/rope", Type::kObject},
    {"/model/rope/kind", Type::kWord},
    {"/model/rope/theta", Type::kNumber},
    {"/model/rope/factor", Type::kNumber},
    {"/model/rope/original_max_positions", Type::kInteger, 0, kInt64},
    {"/model/rope/truncate", Type::kBoolean},
};

// Of an index with layers of every kind.
const Field kLayers[] = {
    {"/model/geometry", Type::kRow, 0, 0, true},
    {"/model/geometry/0/kind", Type::kWord},
    {"/model/geometry/0/value_dim", Type::kInteger, 1, 4096, true},
    {"/model/geometry/2/kind", Type::kWord},
    {"/model/geometry/3/of", Type::kInteger, 0, 2},
    {"/model/geometry/4/query_heads", Type::kInteger, 1, 65536, true},
    {"/model/geometry/4/kv_heads", Type::kInteger, 1, 8, true},  // at most query_heads
    {"/model/geometry/4/head_dim", Type::kInteger, 1, 4096, true},
    {"/model/geometry/4/value_dim", Type::kInteger, 1, 4096, true},
    {"/model/geometry/4/attention_scale", Type::kNumber, 0, 1e300, true},
    {"/model/geometry/4/chunk", Type::kInteger, 1, kInt64},
};

// The fields of every index.
const Field kIndex[] = {
    {"/format", Type::kWord},
    {"/format_version", Type::kAny},
    {"/kind", Type::kWord, 0, 0, false, Code::kUnsupported},
    {"/producer", Type::kAny},
    {"/model", Type::kObject},
    {"/tokenizer_hash", Type::kHash},
    {"/tokens_hash", Type::kHash},
    {"/tokens", Type::kInteger, 1, kU32},
    {"/sink", Type::kInteger, 0, kU32},
    {"/tail", Type::kInteger, 0, kU32},
    {"/partition", Type::kWord},
    {"/levels", Type::kInteger, 0, kMaxLevels},
    {"/dtype", Type::kWord},
    {"/value_means", Type::kBoolean},
    {"/build", Type::kAny},
    {"/layers", Type::kRow},
    {"/layers/0", Type::kObject},
    {"/layers/0/dense", Type::kBoolean},
    {"/layers/0/window", Type::kInteger, 0, kInt64},
    {"/calibration", Type::kObject},
    {"/calibration/queries", Type::kInteger, 0, kInt64},
    {"/calibration/source", Type::kText},
    {"/calibration/coarse_keep", Type::kArray},
    {"/checksums", Type::kObject},
    {"/heavy_hitters", Type::kBoolean, 0, 0, true},
};

const Field kTree[] = {{"/calibration/coarse_keep", Type::kRow},
                       {"/calibration/coarse_keep/0", Type::kNumber, 0, 1},
                       {"/rows", Type::kWord, 0, 0, true}};
const Field kPages[] = {{"/page_size", Type::kInteger, 1, kMaxPageSize},
                        {"/layer_budgets", Type::kObject, 0, 0, true},
                        {"/layer_budgets/allocation", Type::kText},
                        {"/layer_budgets/context", Type::kInteger, 1, kU32},
                        {"/layer_budgets/uniform_budget", Type::kInteger, 1, 32},
                        {"/layer_budgets/p", Type::kNumber, 0, 1},
                        {"/layer_budgets/budget", Type::kRow},
                        {"/layer_budgets/budget/0", Type::kInteger, 1, 32},
                        {"/layer_budgets/cosine", Type::kRow},
                        {"/layer_budgets/cosine/0", Type::kNumber, -1, 1}};
const Field kBuckets[] = {{"/buckets", Type::kInteger, 2, 1 << 20},
                          {"/hidden", Type::kInteger, 1, 1 << 20},
                          {"/logits", Type::kWord}};
const Field kPruned[] = {{"/layers/0/kept", Type::kInteger, 1, 24},
                         {"/pruned", Type::kObject},
                         {"/pruned/selector", Type::kText},
                         {"/pruned/budget", Type::kNumber, 0, 1},
                         {"/pruned/keep", Type::kNumber, 0, 1}};
const Field kQmodel[] = {{"/format", Type::kWord},
                         {"/format_version", Type::kAny},
                         {"/kind", Type::kWord, 0, 0, false, Code::kUnsupported},
                         {"/producer", Type::kAny},
                         {"/model", Type::kObject},
                         {"/tokenizer_hash", Type::kHash},
                         {"/recent", Type::kInteger, 0, kU32},
                         {"/dtype", Type::kWord},
                         {"/dense", Type::kArray},
                         {"/dense/0", Type::kInteger, 0, 1},
                         {"/training", Type::kObject},
                         {"/recall", Type::kArray},
                         {"/recall/0", Type::kObject},
                         {"/recall/0/selectivity", Type::kNumber, 0, 1},
                         {"/recall/0/recall", Type::kNumber, 0, 1},
                         {"/checksums", Type::kObject}};

// Fields that are right by themselves and do not fit the others or the tensors.
struct Conflict {
  const char* file;
  const char* patch;  // of the metadata, a JSON merge patch
  const char* field;
  Code code = Code::kCorrupt;
};
const Conflict kConflicts[] = {
    {"two_levels", R"({"format_version": 99})", "format_version", Code::kUnsupported},
    {"two_levels", R"({"format_version": 0})", "format_version"},
    {"two_levels", R"({"kv": false})", "kv"},
    {"two_levels", R"({"build": "{"})", "build"},
    {"two_levels", R"({"kind": "qmodel"})", "kind", Code::kUnsupported},
    {"two_levels", R"({"tokens": 33})", "layers.0.positions"},
    {"two_levels", R"({"sink": 33})", "sink"},
    {"two_levels", R"({"tail": 31})", "tail"},
    {"two_levels", R"({"tail": 30})", "tokens"},
    {"two_levels", R"({"levels": 0})", "levels"},
    {"two_levels", R"({"levels": 1})", "layers.0.level.2.centroids"},
    {"two_levels", R"({"dtype": "F16"})", "layers.0.level.1.centroids"},
    {"two_levels", R"({"partition": "pages"})", "page_size"},
    {"two_levels", R"({"partition": "pruned"})", "kept"},
    {"two_levels", R"({"value_means": false})", "layers.0.level.1.value_means"},
    {"two_levels", R"({"heavy_hitters": true})", "layers.0.heavy"},
    {"two_levels", R"({"layers": [{"dense": true, "window": 0}]})", "levels"},
    {"two_levels", R"({"layers": [{"dense": true, "window": 0}], "levels": 0})", "exact.keys"},
    {"two_levels", R"({"layers": [{"dense": false, "window": 9}]})", "window"},
    {"two_levels", R"({"layers": [{"dense": false, "window": 0, "rows": "16"}]})", "layers"},
    {"two_levels", R"({"model": {"query_heads": 2, "kv_heads": 2}})", "layers.0.level.1"},
    {"two_levels", R"({"model": {"query_heads": 3, "kv_heads": 2}})", "kv_heads"},
    {"two_levels", R"({"model": {"layers": 60000}})", "sliding_window"},
    {"two_levels", R"({"model": {"rope": {"rotary_dim": 3}}})", "rotary_dim"},
    {"two_levels", R"({"model": {"rope": {"rotary_dim": 10}}})", "rotary_dim"},
    {"two_levels", R"({"after": []})", "after"},
    {"two_levels", R"({"after": ["0123456789abcdeg"]})", "after"},
    {"nothing_clustered", R"({"model": {"sliding_window": [9, 0]}})", "layers[0].window"},
    {"nothing_clustered", R"({"model": {"sliding_window": [8, 8]}})", "layers[1].window"},
    {"layers", R"({"format_version": 3})", "format_version"},
    {"layers", R"({"model": {"kv_heads": 1}})", "layers"},
    {"layers", R"({"model": {"query_heads": 6, "kv_heads": 3}})", "layers.0"},
    {"layers", R"({"model": {"sliding_window": [0, 0, 0, 0, 0, 0]}})", "window"},
    {"layers", R"({"model": {"sliding_window": [0, 9, 7, 0, 0, 0]}})", "geometry[2].kind"},
    {"layers", R"({"model": {"sliding_window": [0, 9, 0, 7, 0, 0]}})", "geometry[3].of"},
    {"layers", R"({"model": {"sliding_window": [0, 9, 0, 0, 7, 0]}})", "geometry[4].chunk"},
    {"layers", R"({"model": {"geometry": null}})", "layers"},
    {"layers",
     R"({"model": {"geometry": [null, null, {"kind": "state"}, {"kind": "shared", "of": 2},
        null, null]}})",
     "geometry[3].of"},
    {"layers", R"({"model": {"geometry": [{"kind": "full", "kv_heads": 4}, null, {"kind": "state"},
        {"kind": "none"}, {"kind": "none"}, {"kind": "none"}]}})",
     "layers[0].dense"},
    {"layers", R"({"model": {"geometry": [{"kind": "full", "value_dim": 6}, null, {"kind": "none"},
        {"kind": "none"}, {"kind": "none"}, {"kind": "none"}]}})",
     "layers.2: state"},
    {"q8", R"({"format_version": 1})", "format_version"},
    {"q8", R"({"rows": null})", "layers.0.keys"},
    {"q8", R"({"value_means": false})", "value_means"},
    {"q8", R"({"layers": [{"dense": false, "window": 0, "rows": "q8"}]})", "rows"},
    {"q8", R"({"layers": [{"dense": false, "window": 0, "rows": "16"}]})", "layers.0.keys"},
    {"pages", R"({"page_size": 4})", "layers.0.pages.min"},
    {"pages", R"({"partition": "kmeans"})", "levels"},
    {"pages", R"({"levels": 1})", "levels"},
    {"pages", R"({"heavy_hitters": false})", "layers.0.heavy"},
    {"pages", R"({"layer_budgets": {"budget": [9]}})", "budget"},
    {"pages", R"({"layer_budgets": {"context": 7}})", "uniform_budget"},
    {"buckets", R"({"buckets": 4})", "layers.1.buckets.offsets"},
    {"buckets", R"({"hidden": 4})", "layers.1.buckets.hidden.weight"},
    {"buckets", R"({"value_means": true})", "value_means"},
    {"buckets", R"({"model": {"rope": {"rotary_dim": 2}}})", "partition"},
    {"buckets", R"({"model": {"rope": {"kind": "other"}}})", "partition"},
    {"pruned", R"({"levels": 1})", "levels"},
    {"pruned", R"({"heavy_hitters": true})", "heavy_hitters"},
    {"pruned", R"({"layers": [{"dense": false, "window": 0, "kept": 13}]})", "layers.0.positions"},
    {"pruned", R"({"layers": [{"dense": true, "window": 0, "kept": 0}]})", "partition"},
    {"pruned", R"({"partition": "kmeans"})", "levels"},
    {"qmodel", R"({"format_version": 2})", "format_version", Code::kUnsupported},
    {"qmodel", R"({"buckets": 4})", "layers.1.centroids"},
    {"qmodel", R"({"buckets": 1048576, "hidden": 1048576})", "layers.1.centroids"},
    {"qmodel", R"({"dtype": "BF16"})", "layers.1.hidden.weight"},
    {"qmodel", R"({"dtype": "I64"})", "dtype"},
    {"qmodel", R"({"roped_centroids": "stored"})", "roped_centroids"},
    {"qmodel", R"({"dense": []})", "layers.0.centroids"},
    {"qmodel", R"({"dense": [0, 0]})", "dense"},
    {"qmodel", R"({"dense": [0, 1]})", "dense"},
    {"qmodel", R"({"recall": [{"recall": 0.5, "selectivity": 0}]})", "selectivity"},
};

std::string path_of(const std::string& file) {
  return concat(SQZ_SOURCE_DIR "/tests/fuzz/seeds/sqz_file_fuzz/", file, ".sqz");
}

// Opens and reads all of it.
Status read(const RawIndex& raw, const std::string& file) {
  const std::string bytes = raw.bytes();
  MemoryEnv env(std::as_bytes(std::span(bytes)));
  const std::string name = file + ".sqz";
  if (file == "qmodel") return read_qmodel_file(name, env).status();
  return SqzFile::open(name, OpenMode::kVerify, env).status();
}

// The metadata with what is JSON text in a string as JSON, and back.
Json unpacked(const RawIndex& raw) {
  Json out;
  for (const auto& [key, text] : raw.metadata) {
    out[key] = Json::accept(text) ? Json::parse(text) : Json(text);
  }
  return out;
}
RawIndex packed(RawIndex raw, const Json& metadata) {
  raw.metadata.clear();
  for (const auto& [key, value] : metadata.items()) {
    raw.metadata[key] = value.is_string() ? value.get<std::string>() : value.dump();
  }
  return raw;
}

TEST(SqzMalformed, EveryFieldOfTheMetadata) {
  const std::pair<std::string, std::vector<std::span<const Field>>> files[] = {
      {"q8", {kModel, kIndex, kTree}}, {"layers", {kLayers}}, {"pages", {kIndex, kPages}},
      {"buckets", {kBuckets}},         {"pruned", {kPruned}}, {"qmodel", {kQmodel, kBuckets}}};
  for (const auto& [file, schemas] : files) {
    const RawIndex good = RawIndex::read(path_of(file));
    for (const std::span<const Field> schema : schemas) {
      testing::expect_all_refused(
          unpacked(good), schema, file,
          [&, &file = file](const Json& metadata) { return read(packed(good, metadata), file); });
    }
  }
}

TEST(SqzMalformed, FieldsThatDoNotFit) {
  for (const Conflict& conflict : kConflicts) {
    SCOPED_TRACE(concat(conflict.file, ": ", conflict.patch));
    const RawIndex good = RawIndex::read(path_of(conflict.file));
    Json metadata = unpacked(good);
    metadata.merge_patch(Json::parse(conflict.patch));
    expect_refused(read(packed(good, metadata), conflict.file), conflict.code, conflict.file,
                   conflict.field);
  }
}

// Damages a tensor; false if tensor `i` cannot have this damage.
using Damage = std::function<bool(RawIndex&, size_t i)>;
const std::pair<const char*, Damage> kDamages[] = {
    {"renamed", [](RawIndex& raw, size_t i) { return !(raw.tensors[i].name += "x").empty(); }},
    {"retyped",
     [](RawIndex& raw, size_t i) {
       std::string& dtype = raw.tensors[i].dtype;
       dtype = dtype == "BF16" ? "F16" : dtype == "F32" ? "I32" : dtype == "U32" ? "F32" : "BOOL";
       return true;
     }},
    {"flat",
     [](RawIndex& raw, size_t i) {
       std::vector<int64_t>& shape = raw.tensors[i].shape;
       int64_t count = 1;
       for (const int64_t size : shape) count *= size;
       if (shape.size() < 2) return false;
       shape = {count};
       return true;
     }},
    {"longer",
     [](RawIndex& raw, size_t i) {
       RawIndex::Tensor& tensor = raw.tensors[i];
       tensor.shape[0] *= 2;
       tensor.data += tensor.data;
       return true;
     }},
    {"missing",
     [](RawIndex& raw, size_t i) {
       raw.tensors.erase(raw.tensors.begin() + static_cast<ptrdiff_t>(i));
       return true;
     }},
    {"behind another",
     [](RawIndex& raw, size_t i) {
       raw.tensors.insert(raw.tensors.begin() + static_cast<ptrdiff_t>(i),
                          {"more", "U8", {4096}, std::string(4096, '\0')});
       return true;
     }},
    {"not aligned", [](RawIndex& raw, size_t i) {
       raw.tensors.insert(raw.tensors.begin() + static_cast<ptrdiff_t>(i),
                          {"padding.x", "U8", {8}, std::string(8, '\0')});
       return raw.tensors[i + 1].name != "header.xxh3_128";
     }}};

TEST(SqzMalformed, EveryTensor) {
  for (const std::string file :
       {"two_levels", "q8", "pages", "buckets", "pruned", "layers", "qmodel"}) {
    const RawIndex good = RawIndex::read(path_of(file));
    for (size_t i = 0; i < good.tensors.size(); ++i) {
      const std::string name = good.tensors[i].name;
      if (name.starts_with("padding.") || is_unused(name)) continue;
      for (const auto& [what, damage] : kDamages) {
        SCOPED_TRACE(concat(file, ": ", name, " ", what));
        RawIndex raw = good;
        // The header alone says of what type and shape a state is.
        const bool free = name.find(".state.") != std::string::npos;
        if (free && (what == std::string("retyped") || what == std::string("flat"))) continue;
        if (!damage(raw, i)) continue;
        expect_refused(read(raw, file), Code::kCorrupt, file,
                       what == std::string("behind another") ? "more"
                       : free                                ? ""
                                                             : name);
      }
    }
  }
}

TEST(SqzMalformed, NumbersOfClusters) {
  for (const auto& [tensor, clusters] : {std::pair("layers.0.level.1.centroids", 0),
                                         {"layers.0.level.2.centroids", 25},
                                         {"layers.0.level.2.centroids", 1}}) {
    RawIndex raw = RawIndex::read(path_of("two_levels"));
    raw.at(tensor).shape = {1, clusters, 8};
    raw.at(tensor).data.resize(static_cast<size_t>(clusters) * 16);
    expect_refused(read(raw, "two_levels"), Code::kCorrupt, "two_levels", "layers.0: clusters");
  }
}

TEST(SqzMalformed, TheContainer) {
  const auto refused = [](const char* field, const std::function<void(RawIndex&)>& change) {
    RawIndex raw = RawIndex::read(path_of("two_levels"));
    change(raw);
    expect_refused(read(raw, "two_levels"), Code::kCorrupt, "two_levels", field);
  };
  refused("file length", [](RawIndex& raw) { raw.tail = "x"; });
  refused("start of the data", [](RawIndex& raw) { raw.page = 4096 + 64; });
  refused("padding.0", [](RawIndex& raw) { raw.at("padding.0").dtype = "I8"; });
  refused("padding.0", [](RawIndex& raw) { raw.at("padding.0").shape = {2, 16}; });
  refused("header.xxh3_128", [](RawIndex& raw) {
    raw.tensors.back().shape = {8};
    raw.tensors.back().data.resize(8);
  });
  refused("hash of the header", [](RawIndex& raw) {
    raw.keep_hash = true;
    raw.metadata["sink"] = "3";
  });
}

TEST(SqzMalformed, ForeignFiles) {
  for (const std::string& bytes :
       {std::string(), std::string("abc"), std::string("<!DOCTYPE html><html></html>"),
        std::string("GGUF\3\0\0\0", 8), std::string("\x89HDF\r\n\x1a\n\0\0\0\0\0\0", 14),
        std::string(100, '\0'), testing::safetensors_bytes("{}", ""),
        testing::safetensors_bytes(R"({"__metadata__":{"format":"pt"}})", "")}) {
    MemoryEnv env(std::as_bytes(std::span(bytes)));
    for (const OpenMode mode : {OpenMode::kMmap, OpenMode::kRead}) {
      expect_refused(SqzFile::open("f.sqz", mode, env).status(), Code::kCorrupt, "f.sqz", "");
    }
    expect_refused(read_qmodel_file("f.sqz", env).status(), Code::kCorrupt, "f.sqz", "");
  }
}

TEST(SqzMalformed, AnotherWritersPaddingsAndKeysAreFine) {
  RawIndex raw = RawIndex::read(path_of("two_levels"));
  raw.tensors.insert(raw.tensors.begin() + 1,
                     {"padding.more", "U8", {4096}, std::string(4096, '\0')});
  raw.metadata["note"] = "unknown keys are left alone";
  const Status status = read(raw, "two_levels");
  EXPECT_TRUE(status.ok()) << status.message();
}

// One bit of every byte of a small file, and every length below its own.
void expect_every_damage_refused(const std::string& file) {
  std::string bytes = testing::read_file(path_of(file));
  const auto readable = [&](std::string_view text) {
    MemoryEnv env(std::as_bytes(std::span(text)));
    return (file == "qmodel" ? read_qmodel_file(file, env).status()
                             : SqzFile::open(file, OpenMode::kVerify, env).status())
        .ok();
  };
  ASSERT_TRUE(readable(bytes));
  for (size_t at = 0; at < bytes.size(); ++at) {
    const char flip = static_cast<char>(1 << at % 8);
    bytes[at] = static_cast<char>(bytes[at] ^ flip);
    ASSERT_FALSE(readable(bytes)) << "byte " << at;
    bytes[at] = static_cast<char>(bytes[at] ^ flip);
    ASSERT_FALSE(readable(std::string_view(bytes).substr(0, at))) << at;
  }
}

TEST(SqzMalformed, EveryByteAndEveryLength) {
  expect_every_damage_refused("pruned");
  expect_every_damage_refused("qmodel");
}

}  // namespace
}  // namespace sqz
