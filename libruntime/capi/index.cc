#include "libruntime/capi/fence.h"
#include "libruntime/capi/handles.h"
#include "libruntime/capi/tensor.h"

namespace {

using sqz::Code;
using sqz::concat;
using sqz::Status;
using sqz::capi::fence;
using sqz::capi::invalid;

Status check_layer(const sqz_index* index, int64_t layer) {
  if (index == nullptr) return invalid("index: found null");
  const int64_t layers = index->file->metadata().model.layers;
  if (layer >= 0 && layer < layers) return {};
  return invalid(concat("layer: found ", layer, ", expected 0 to ", layers - 1));
}

}  // namespace

// The enums have the same numbers.
static_assert(static_cast<int>(sqz::LayerKind::kShared) == SQZ_LAYER_SHARED);
static_assert(static_cast<int>(sqz::LayerKind::kNone) == SQZ_LAYER_NONE);
static_assert(static_cast<int>(sqz::OpenMode::kMmap) == SQZ_OPEN_MMAP);
static_assert(static_cast<int>(sqz::OpenMode::kRead) == SQZ_OPEN_READ);
static_assert(static_cast<int>(sqz::OpenMode::kVerify) == SQZ_OPEN_VERIFY);

extern "C" {

sqz_status sqz_index_open(const char* path, sqz_open_mode mode, sqz_index** index) {
  return fence([&]() -> Status {
    if (index == nullptr) return invalid("index: found null, expected where to put the handle");
    *index = nullptr;
    if (path == nullptr) return invalid("path: found null, expected a file name");
    const int number = sqz::capi::enum_number(mode);
    if (number < SQZ_OPEN_MMAP || number > SQZ_OPEN_VERIFY) {
      return invalid(concat("mode: found ", number, ", expected 0 (mmap), 1 (read) or 2 (verify)"));
    }
    auto handle = std::make_unique<sqz_index>();
    SQZ_ASSIGN_OR_RETURN(handle->file,
                         sqz::SqzFile::open(path, static_cast<sqz::OpenMode>(number)));
    handle->fingerprint = sqz::fingerprint(handle->file->metadata().model);
    const sqz::IndexMetadata& metadata = handle->file->metadata();
    handle->context_id = metadata.context_id();
    for (const std::string& id : metadata.after) {
      handle->after += (handle->after.empty() ? "" : ",") + id;
    }
    *index = handle.release();
    return {};
  });
}

void sqz_index_close(sqz_index* index) {
  delete index;
}

sqz_status sqz_index_describe(const sqz_index* index, sqz_index_info* info) {
  return fence([&]() -> Status {
    if (index == nullptr) return invalid("index: found null");
    const sqz::IndexMetadata& m = index->file->metadata();
    sqz_index_info out = {};
    out.format_version = static_cast<int32_t>(m.version);
    out.tokens = m.tokens;
    out.sink = m.sink;
    out.tail = m.tail;
    out.layers = m.model.layers;
    out.query_heads = m.model.query_heads;
    out.kv_heads = m.model.kv_heads;
    out.head_dim = m.model.head_dim;
    out.levels = m.levels;
    out.attention_scale = m.model.attention_scale;
    out.file_bytes = index->file->file_bytes();
    out.partition = static_cast<int32_t>(m.partition);
    out.page_size = m.page_size;
    out.dtype_code = m.dtype == sqz::DType::kBF16 ? 4 : 2;
    out.context_id = index->context_id.c_str();
    out.after = index->after.c_str();
    out.composes = sqz::capi::composes(m) ? 1 : 0;
    out.dtype_bits = 16;
    out.producer = m.producer.c_str();
    out.architecture = m.model.architecture.c_str();
    out.model_fingerprint = index->fingerprint.c_str();
    out.tokenizer_hash = m.tokenizer_hash.c_str();
    out.tokens_hash = m.tokens_hash.c_str();
    return sqz::capi::write_struct(out, "info", info);
  });
}

sqz_status sqz_index_describe_layer(const sqz_index* index, int64_t layer, sqz_layer_info* info) {
  return fence([&]() -> Status {
    SQZ_RETURN_IF_ERROR(check_layer(index, layer));
    const sqz::LayerGeometry g = index->file->metadata().model.layer(layer);
    const bool keys = g.has_keys() || g.kind == sqz::LayerKind::kShared;
    sqz_layer_info out = {};
    out.kind = static_cast<int32_t>(g.kind);
    out.of = g.of;
    out.states = std::ssize(index->file->layer(layer).state);
    if (keys) {
      out.query_heads = g.query_heads;
      out.kv_heads = g.kv_heads;
      out.head_dim = g.head_dim;
      out.value_dim = g.value_dim;
      out.window = g.window;
      out.chunk = g.chunk;
      out.attention_scale = g.attention_scale;
    }
    return sqz::capi::write_struct(out, "info", info);
  });
}

sqz_status sqz_index_state(const sqz_index* index, int64_t layer, int64_t number, const char** name,
                           sqz_tensor* view) {
  return fence([&]() -> Status {
    if (name == nullptr || view == nullptr) return invalid("name or view: found null");
    SQZ_RETURN_IF_ERROR(check_layer(index, layer));
    const std::vector<sqz::StateTensor>& states = index->file->layer(layer).state;
    if (number < 0 || number >= std::ssize(states)) {
      return invalid(concat("number: found ", number, ", expected less than ", states.size(),
                            ", the state tensors of layer ", layer));
    }
    const sqz::StateTensor& state = states[static_cast<size_t>(number)];
    *name = state.name.c_str();
    *view = {};
    view->data = const_cast<void*>(state.data);
    view->device_type = sqz::capi::kCpu;
    view->ndim = static_cast<int32_t>(state.shape.size());
    view->dtype_code = sqz::capi::dtype_code(state.dtype);
    view->dtype_bits = static_cast<uint8_t>(8 * sqz::dtype_size(state.dtype));
    view->dtype_lanes = 1;
    view->shape = const_cast<int64_t*>(state.shape.data());
    return {};
  });
}

sqz_status sqz_index_upload(sqz_index* index, const sqz_upload_options* options) {
  return fence([&]() -> Status {
    if (index == nullptr) return invalid("index: found null");
    sqz_upload_options o = {};
    if (options != nullptr) SQZ_RETURN_IF_ERROR(sqz::capi::read_struct(options, "options", o));
    if (o.threads < 0 || o.threads > 256) {
      return invalid(concat("options.threads: found ", o.threads, ", expected 0 to 256"));
    }
    const std::lock_guard lock(index->mutex);
    const auto found = index->uploaded.find(o.device_id);
    if (found != index->uploaded.end() && found->second.get() != nullptr) {
      return invalid(concat("options.device_id: found ", o.device_id,
                            ", where the index is already, expected another device"));
    }
    SQZ_ASSIGN_OR_RETURN(auto whole, sqz::capi::serve(*index));
    SQZ_ASSIGN_OR_RETURN(auto heads,
                         sqz::range_of_heads(std::move(whole), o.first_kv_head, o.kv_heads));
    SQZ_ASSIGN_OR_RETURN(auto memory, sqz::cuda::upload_index(heads, {.device = o.device_id,
                                                                      .threads = o.threads,
                                                                      .wait = o.background == 0}));
    index->uploaded[o.device_id] = sqz::capi::OfThisProcess<sqz::capi::Uploaded>(
        {.heads = std::move(heads), .memory = std::move(memory)});
    return {};
  });
}

sqz_status sqz_index_unload(sqz_index* index, int32_t device_id) {
  return fence([&]() -> Status {
    if (index == nullptr) return invalid("index: found null");
    const std::lock_guard lock(index->mutex);
    if (index->uploaded.erase(device_id) == 0) {
      return invalid(concat("device_id: found ", device_id, ", expected one that has the index"));
    }
    return {};
  });
}

sqz_status sqz_index_verify(const sqz_index* index) {
  return fence([&]() -> Status {
    if (index == nullptr) return invalid("index: found null");
    return index->file->verify();
  });
}

}  // extern "C"
