// Options and results of sqz_build.h, as JSON, and its other arguments.
#pragma once

#include <functional>
#include <initializer_list>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/json_fields.h"
#include "libindex/compress.h"
#include "libruntime/capi/fence.h"
#include "libruntime/capi/tensor.h"
#include "sqz/sqz_build.h"

namespace sqz::capi {

// The options of one call. Getters are those of JsonFields; status() is asked after them.
class Options : public JsonFields {
 public:
  // `text` may be null: no options. kInvalidArgument for a text that is no JSON object, and for a
  // member that is not one of `names`.
  static Result<Options> parse(const char* text, std::initializer_list<std::string_view> names);

  // One of `choices`. The first is the default.
  std::string choice(std::string_view key, std::initializer_list<std::string_view> choices);
  int threads() { return static_cast<int>(integer("threads", 0, 1024, 0)); }
  // "rows" are given: they have other choices in a build.
  CompressOptions compress(std::string_view rows);
  // The first complaint, as kInvalidArgument.
  Status status() const;

 private:
  explicit Options(std::shared_ptr<const JsonDocument> json)
      : JsonFields(json->root(), "options"), json_(std::move(json)) {}

  std::shared_ptr<const JsonDocument> json_;
};

// Sets sqz_last_result().
void set_result(const JsonText& result);

// Tells the host how far a call is. Never empty.
std::function<void(double)> teller(const sqz_progress* progress);

// The numbers of a tensor in float32: its own memory, or a copy in `room`.
std::span<const float> floats_of(const TensorView& tensor, std::vector<float>& room);

}  // namespace sqz::capi
