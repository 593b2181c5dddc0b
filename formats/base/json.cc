#include "formats/base/json.h"

#include <algorithm>
#include <nlohmann/json.hpp>

namespace sqz {
namespace {

using Library = nlohmann::json;  // only its SAX parser, and scalars to print: neither has children

constexpr size_t kMaxDepth = 64;

}  // namespace

// Values whose array or object is not closed yet wait in pending_; closing moves them to their
// place in the document.
class JsonBuilder : public nlohmann::json_sax<Library> {
 public:
  JsonBuilder(std::string_view label, size_t bytes) : label_(label) {
    out_.text_.reserve(bytes);  // no string is longer than its source: views stay valid
  }

  bool null() override { return add(JsonValue()); }
  bool boolean(bool value) override { return add(JsonValue(value)); }
  bool number_integer(number_integer_t value) override { return add(JsonValue(value)); }
  bool number_unsigned(number_unsigned_t value) override { return add(JsonValue(value)); }
  bool number_float(number_float_t value, const string_t& text) override {
    if (text.find_first_of(".eE") != string_t::npos) return add(JsonValue(value));
    return fail(concat("integer ", in_quotes(text), " does not fit in 64 bits"));
  }
  bool string(string_t& value) override { return add(JsonValue(keep(value))); }
  bool binary(binary_t&) override { return fail("binary value"); }
  bool key(string_t& name) override {
    key_ = keep(name);
    return true;
  }
  bool start_object(std::size_t) override { return open(JsonValue::Kind::kObject); }
  bool start_array(std::size_t) override { return open(JsonValue::Kind::kArray); }
  bool end_object() override {
    const auto first = first_item();
    std::sort(first, pending_.end(), [](auto& a, auto& b) { return a.key_ < b.key_; });
    const auto twice = std::adjacent_find(first, pending_.end(),
                                          [](auto& a, auto& b) { return a.key_ == b.key_; });
    if (twice != pending_.end()) return fail("duplicate key " + in_quotes(twice->key_));
    return end_array();
  }
  bool end_array() override {
    const auto first = first_item();
    JsonValue& value = pending_[open_.back()];
    open_.pop_back();
    value.begin_ = out_.values_.size();
    value.size_ = static_cast<size_t>(pending_.end() - first);
    out_.values_.insert(out_.values_.end(), first, pending_.end());
    pending_.erase(first, pending_.end());
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // The library prefixes "[json.exception...] ", and quotes the text as it is.
    std::string what = error.what();
    if (const size_t end = what.find("] "); end != std::string::npos) what = what.substr(end + 2);
    if (const size_t raw = what.find("; last read: '"); raw != std::string::npos) {
      what.erase(raw, what.rfind('\'') + 1 - raw);
    }
    return fail(concat("byte ", position, ": ", what));
  }

  Result<JsonDocument> finish() {
    SQZ_RETURN_IF_ERROR(status_);
    out_.root_ = pending_.front();
    place(out_.root_);
    for (JsonValue& value : out_.values_) place(value);
    return std::move(out_);
  }

 private:
  bool fail(const std::string& what) {
    if (status_.ok()) status_ = {Code::kCorrupt, concat(label_, ": not valid JSON: ", what)};
    return false;
  }
  bool add(JsonValue value) {
    value.key_ = std::exchange(key_, {});
    pending_.push_back(value);
    return true;
  }
  bool open(JsonValue::Kind kind) {
    if (open_.size() >= kMaxDepth) return fail(concat("nested deeper than ", kMaxDepth, " levels"));
    open_.push_back(pending_.size());
    JsonValue value;
    value.kind_ = kind;
    return add(value);
  }
  std::vector<JsonValue>::iterator first_item() {
    return pending_.begin() + static_cast<ptrdiff_t>(open_.back()) + 1;
  }
  std::string_view keep(std::string_view text) {
    const size_t begin = out_.text_.size();
    out_.text_.insert(out_.text_.end(), text.begin(), text.end());
    return {out_.text_.data() + begin, text.size()};
  }
  void place(JsonValue& value) {
    const bool has_items = value.is_array() || value.is_object();
    if (has_items) value.first_ = out_.values_.data() + value.begin_;
  }

  std::string_view label_;
  JsonDocument out_;
  std::vector<JsonValue> pending_;
  std::vector<size_t> open_;  // places in pending_
  std::string_view key_;
  Status status_;
};

Result<JsonDocument> parse_json(std::string_view text, std::string_view label) {
  JsonBuilder builder(label, text.size());
  Library::sax_parse(text, &builder);
  return builder.finish();
}

double JsonValue::number() const {
  return kind_ == Kind::kInteger    ? static_cast<double>(integer_)
         : kind_ == Kind::kUnsigned ? static_cast<double>(unsigned_)
         : kind_ == Kind::kNumber   ? number_
                                    : 0.0;
}

std::optional<int64_t> JsonValue::integer(int64_t low, int64_t high) const {
  const bool fits =
      kind_ == Kind::kInteger || (kind_ == Kind::kUnsigned && std::in_range<int64_t>(unsigned_));
  if (!fits) return std::nullopt;
  const int64_t value = kind_ == Kind::kInteger ? integer_ : static_cast<int64_t>(unsigned_);
  return low <= value && value <= high ? std::optional(value) : std::nullopt;
}

std::optional<uint64_t> JsonValue::unsigned_integer() const {
  return kind_ == Kind::kUnsigned ? std::optional(unsigned_) : std::nullopt;
}

std::span<const JsonValue> JsonValue::items() const {
  if (!is_array() && !is_object()) return {};
  return {first_, size_};
}

const JsonValue* JsonValue::find(std::string_view key) const {
  if (!is_object()) return nullptr;
  const std::span<const JsonValue> members = items();
  const auto at =
      std::lower_bound(members.begin(), members.end(), key,
                       [](const JsonValue& member, auto name) { return member.key_ < name; });
  return at != members.end() && at->key_ == key ? &*at : nullptr;
}

JsonText::JsonText(double value) : text_(Library(value).dump()) {}

JsonText::JsonText(std::string_view value)
    : text_(Library(value).dump(-1, ' ', false, Library::error_handler_t::replace)) {}

JsonText::JsonText(std::initializer_list<std::pair<const std::string, JsonText>> members)
    : JsonText(JsonMembers(members)) {}

JsonText::JsonText(const JsonValue& value) {
  if (value.is_null()) {
    text_ += "null";
  } else if (value.is_boolean()) {
    *this = value.boolean();
  } else if (const auto natural = value.unsigned_integer()) {
    *this = *natural;
  } else if (const auto integer = value.integer(INT64_MIN, INT64_MAX)) {
    *this = *integer;
  } else if (value.is_number()) {
    *this = value.number();
  } else if (value.is_string()) {
    *this = value.string();
  } else {
    text_ += value.is_array() ? '[' : '{';
    for (const JsonValue& item : value.items()) {
      value.is_array() ? add(JsonText(item)) : add(item.key(), JsonText(item));
    }
    text_ += value.is_array() ? ']' : '}';
  }
}

JsonDocument JsonText::parsed() const {
  Result<JsonDocument> document = parse_json(text_, "JSON");
  return document.ok() ? *std::move(document) : JsonDocument();
}

void JsonText::add(const JsonText& item) {
  if (text_.size() > 1) text_ += ',';
  text_ += item.text_;
}

void JsonText::add(std::string_view key, const JsonText& value) {
  add(JsonText(key));
  text_ += ':';
  text_ += value.text_;
}

std::string found_text(const JsonValue& value) {
  if (value.is_string()) return in_quotes(value.string());
  if (value.is_object()) return "an object";
  if (value.is_array()) return concat("an array of ", value.size());
  return JsonText(value).str();
}

}  // namespace sqz
