#include "libindex/capi/json.h"

#include <algorithm>

namespace sqz::capi {
namespace {

thread_local std::string last_result;

std::string list_of(std::initializer_list<std::string_view> names) {
  std::string out;
  for (const std::string_view name : names) out += concat(out.empty() ? "" : ", ", name);
  return out;
}

}  // namespace

Result<Options> Options::parse(const char* text, std::initializer_list<std::string_view> names) {
  auto json = parse_json_object(text == nullptr ? "{}" : text, "options");
  if (!json.ok()) return invalid(json.status().message());
  for (const JsonValue& member : json->root().items()) {
    if (std::find(names.begin(), names.end(), member.key()) != names.end()) continue;
    return invalid(
        concat("options: found ", in_quotes(member.key()), ", expected some of ", list_of(names)));
  }
  return Options(std::make_shared<const JsonDocument>(std::move(json).value()));
}

std::string Options::choice(std::string_view key, std::initializer_list<std::string_view> choices) {
  std::string found = text(key, std::string(*choices.begin()));
  if (std::find(choices.begin(), choices.end(), found) != choices.end()) return found;
  complain(key, list_of(choices));
  return std::string(*choices.begin());
}

CompressOptions Options::compress(std::string_view rows) {
  CompressOptions out;
  out.rows = rows_of(rows);
  if (has("layers16")) out.layers16 = integers("layers16", 0, INT32_MAX);
  return out;
}

Status Options::status() const {
  const Status& first = JsonFields::status();
  return first.ok() ? first : invalid(first.message());
}

void set_result(const JsonText& result) {
  last_result = result.str();
}

std::function<void(double)> teller(const sqz_progress* progress) {
  if (progress == nullptr || progress->update == nullptr) return [](double) {};
  return [told = *progress](double done) { told.update(told.user, done); };
}

std::span<const float> floats_of(const TensorView& tensor, std::vector<float>& room) {
  const int64_t count = tensor.bytes / dtype_size(tensor.dtype);
  if (tensor.dtype == DType::kF32) {
    return {static_cast<const float*>(tensor.data), static_cast<size_t>(count)};
  }
  room.resize(static_cast<size_t>(count));
  to_floats(tensor.data, tensor.dtype, count, room.data());
  return room;
}

}  // namespace sqz::capi

const char* sqz_last_result(void) {
  return sqz::capi::last_result.c_str();
}
