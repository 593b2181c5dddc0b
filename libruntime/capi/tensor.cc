#include "libruntime/capi/tensor.h"

#include <algorithm>
#include <string>

#include "formats/base/checked.h"
#include "libruntime/capi/fence.h"

namespace sqz::capi {
namespace {

constexpr uint8_t kFloat = 2, kBfloat = 4;  // DLDataTypeCode

Status invalid(const char* name, const std::string& field, const std::string& found,
               const std::string& expected) {
  return {Code::kInvalidArgument, bad_field(name, field, found, expected)};
}

std::string list_text(std::span<const int64_t> shape, bool any) {
  std::string text = "[";
  for (const int64_t dim : shape) {
    if (text.size() > 1) text += ", ";
    text += any && dim < 0 ? "any" : std::to_string(dim);
  }
  return text + "]";
}

// As expected: any number is right where one is negative.
std::string shape_text(std::initializer_list<int64_t> shape) {
  return list_text({shape.begin(), shape.size()}, true);
}

std::string dtype_text(const sqz_tensor& t) {
  constexpr const char* kKinds[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const bool known = t.dtype_code < std::size(kKinds);
  const std::string kind = known ? kKinds[t.dtype_code] : concat("code ", int{t.dtype_code}, ": ");
  return concat(kind, int{t.dtype_bits}, " with ", t.dtype_lanes,
                t.dtype_lanes == 1 ? " lane" : " lanes");
}

Result<DType> dtype_of(const sqz_tensor& t, const char* name) {
  if (t.dtype_lanes == 1) {
    if (t.dtype_code == kFloat && t.dtype_bits == 32) return DType::kF32;
    if (t.dtype_code == kFloat && t.dtype_bits == 16) return DType::kF16;
    if (t.dtype_code == kBfloat && t.dtype_bits == 16) return DType::kBF16;
  }
  return invalid(name, "dtype", dtype_text(t), "f32, f16 or bf16 with 1 lane");
}

Status check_shape(const sqz_tensor& t, const char* name, std::initializer_list<int64_t> shape) {
  if (t.ndim != static_cast<int32_t>(shape.size())) {
    return invalid(name, "ndim", concat(t.ndim), concat(shape.size()));
  }
  if (t.shape == nullptr) return invalid(name, "shape", "null", shape_text(shape));
  const std::span<const int64_t> found(t.shape, shape.size());
  for (size_t i = 0; i < shape.size(); ++i) {
    const int64_t want = shape.begin()[i];
    if (found[i] < 0 || (want >= 0 && found[i] != want)) {
      return invalid(name, "shape", list_text(found, false), shape_text(shape));
    }
  }
  return {};
}

Status check_contiguous(const sqz_tensor& t, const char* name) {
  // The strides of an empty tensor say nothing, and their products may overflow.
  if (std::count(t.shape, t.shape + t.ndim, 0) > 0) return {};
  int64_t stride = 1;
  for (int32_t i = t.ndim; t.strides != nullptr && i-- > 0;) {
    if (t.shape[i] > 1 && t.strides[i] != stride) {
      return invalid(name, concat("strides[", i, "]"), concat(t.strides[i]),
                     concat(stride, " (contiguous)"));
    }
    stride *= t.shape[i];
  }
  return {};
}

// From the first element to behind the last; nothing if that is beyond 2^63.
std::optional<int64_t> extent(const sqz_tensor& t) {
  std::optional<int64_t> last = 0, next = 1;
  for (int32_t i = t.ndim; i-- > 0;) {
    if (t.shape[i] == 0) return 0;
    const std::optional<int64_t> stride = t.strides != nullptr ? t.strides[i] : next;
    const auto far = stride ? checked_mul(t.shape[i] - 1, *stride) : std::nullopt;
    last = last && far ? checked_add(*last, *far) : std::nullopt;
    next = next ? checked_mul(*next, t.shape[i]) : std::nullopt;
  }
  return last ? checked_add(*last, int64_t{1}) : std::nullopt;
}

// Device, element type, shape and memory.
Result<TensorView> view_tensor(const sqz_tensor* tensor, const char* name,
                               std::initializer_list<int64_t> shape, int device) {
  if (tensor == nullptr) return invalid(name, "tensor", "null", "a tensor");
  if (tensor->device_type != (device < 0 ? kCpu : kCuda)) {
    const bool misplaced = device < 0 && tensor->device_type == kCuda;
    return Status(misplaced ? Code::kUnsupported : Code::kInvalidArgument,
                  bad_field(name, "device_type", concat(tensor->device_type),
                            device < 0 ? "1 (CPU)" : "2 (CUDA)"));
  }
  if (device >= 0 && tensor->device_id != device) {
    return invalid(name, "device_id", concat(tensor->device_id),
                   concat(device, ", the session's device"));
  }
  TensorView view;
  SQZ_ASSIGN_OR_RETURN(view.dtype, dtype_of(*tensor, name));
  SQZ_RETURN_IF_ERROR(check_shape(*tensor, name, shape));
  const int64_t size = dtype_size(view.dtype);
  const auto count = extent(*tensor);
  const auto bytes = count ? checked_mul(*count, size) : std::nullopt;
  if (!bytes) return invalid(name, "shape", "more than 2^63 bytes", shape_text(shape));
  view.first_dim = tensor->shape[0];
  view.bytes = *bytes;
  if (tensor->data == nullptr && view.bytes > 0) return invalid(name, "data", "null", "memory");
  view.data = static_cast<std::byte*>(tensor->data) + tensor->byte_offset;
  if (reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(size) != 0) {
    return invalid(name, "data", "an unaligned address", concat("a multiple of ", size));
  }
  return view;
}

}  // namespace

Result<TensorView> check_tensor(const sqz_tensor* tensor, const char* name,
                                std::initializer_list<int64_t> shape, int device) {
  SQZ_ASSIGN_OR_RETURN(const TensorView view, view_tensor(tensor, name, shape, device));
  SQZ_RETURN_IF_ERROR(check_contiguous(*tensor, name));
  // Kernels read and write 16 bytes at once.
  if (device >= 0 && reinterpret_cast<uintptr_t>(view.data) % 16 != 0) {
    return invalid(name, "data", "an unaligned address", "a multiple of 16 on a GPU");
  }
  return view;
}

uint8_t dtype_code(DType dtype) {
  switch (dtype) {
    case DType::kBool:
      return 6;
    case DType::kBF16:
      return kBfloat;
    case DType::kF16:
    case DType::kF32:
    case DType::kF64:
      return kFloat;
    case DType::kI8:
    case DType::kI16:
    case DType::kI32:
    case DType::kI64:
      return 0;
    default:
      return 1;  // unsigned
  }
}

Result<StateTensor> check_state(const sqz_tensor* tensor, const char* name) {
  if (tensor == nullptr) return invalid(name, "tensor", "null", "a tensor");
  const sqz_tensor& t = *tensor;
  if (t.device_type != kCpu) return invalid(name, "device_type", concat(t.device_type), "1 (CPU)");
  if (t.ndim < 0 || t.ndim > 16 || (t.ndim > 0 && t.shape == nullptr)) {
    return invalid(name, "ndim", concat(t.ndim), "0 to 16, and a shape");
  }
  StateTensor out;
  out.name = name;
  bool known = false;
  for (int i = 0; i <= static_cast<int>(DType::kF64) && !known; ++i) {
    out.dtype = static_cast<DType>(i);
    known = t.dtype_lanes == 1 && t.dtype_code == dtype_code(out.dtype) &&
            t.dtype_bits == 8 * dtype_size(out.dtype);
  }
  if (!known) return invalid(name, "dtype", dtype_text(t), "a type of safetensors");
  out.shape.assign(t.shape, t.shape + t.ndim);
  const auto count = checked_elements(out.shape);
  if (!count || !checked_mul(*count, dtype_size(out.dtype))) {
    return invalid(name, "shape", list_text(out.shape, false), "less than 2^63 bytes");
  }
  if (*count == 0) return out;
  SQZ_RETURN_IF_ERROR(check_contiguous(t, name));
  if (t.data == nullptr) return invalid(name, "data", "null", "memory");
  out.data = static_cast<const std::byte*>(t.data) + t.byte_offset;
  return out;
}

Result<LseView> check_lse(const sqz_tensor* tensor, const char* name, int64_t tokens, int64_t heads,
                          int device) {
  LseView view;
  SQZ_ASSIGN_OR_RETURN(view.tensor, view_tensor(tensor, name, {tokens, heads}, device));
  if (view.tensor.dtype != DType::kF32) return invalid(name, "dtype", "another", "f32");
  const int64_t t = tensor->shape[0], h = tensor->shape[1];
  // The stride of a dimension of one element says nothing.
  const int64_t head = tensor->strides == nullptr || h == 1 ? 1 : tensor->strides[1];
  const int64_t token = tensor->strides == nullptr || t <= 1 ? h * head : tensor->strides[0];
  const auto all_tokens = checked_mul(t, token), all_heads = checked_mul(h, head);
  const bool apart = token >= 1 && head >= 1 &&
                     ((all_heads && token >= *all_heads) || (all_tokens && head >= *all_tokens));
  if (!apart && t > 0 && h > 0) {
    return invalid(name, "strides", concat("[", token, ", ", head, "]"),
                   concat("strides that keep ", t, " x ", h, " elements apart"));
  }
  view.rows = {static_cast<float*>(view.tensor.data), h, token, head};
  return view;
}

Status check_disjoint(const TensorView& a, const char* name_a, const TensorView& b,
                      const char* name_b) {
  const auto begin_a = reinterpret_cast<uintptr_t>(a.data);
  const auto begin_b = reinterpret_cast<uintptr_t>(b.data);
  const bool apart = begin_a + static_cast<uintptr_t>(a.bytes) <= begin_b ||
                     begin_b + static_cast<uintptr_t>(b.bytes) <= begin_a;
  if (apart) return {};
  return {Code::kInvalidArgument, concat(name_a, " and ", name_b,
                                         ": found in the same memory, "
                                         "expected apart")};
}

}  // namespace sqz::capi
