#include "formats/base/json.h"

#include <set>
#include <vector>

namespace sqz {
namespace {

constexpr size_t kMaxDepth = 64;

// Checks a document while nlohmann's SAX parser reads it, and builds the value at the same time.
class StrictHandler : public nlohmann::json_sax<Json> {
 public:
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t& text) override {
    if (text.find_first_of(".eE") == string_t::npos) {
      return fail(concat("integer ", text, " does not fit in 64 bits"));
    }
    return add(value);
  }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool binary(binary_t&) override { return fail("binary value"); }
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }
  bool key(string_t& name) override {
    if (stack_.back()->contains(name)) return fail(concat("duplicate key \"", name, "\""));
    key_ = std::move(name);
    return true;
  }
  bool parse_error(std::size_t position, const std::string&,
                   const nlohmann::detail::exception& error) override {
    // nlohmann prefixes "[json.exception...] ": the reader wants what follows.
    std::string what = error.what();
    if (const size_t end = what.find("] "); end != std::string::npos) what = what.substr(end + 2);
    error_ = concat("byte ", position, ": ", what);
    return false;
  }

  const std::string& error() const { return error_; }
  Json take() { return std::move(root_); }

 private:
  bool fail(std::string message) {
    error_ = std::move(message);
    return false;
  }

  Json* place(Json value) {
    if (stack_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    Json& parent = *stack_.back();
    if (parent.is_object()) return &(parent[std::move(key_)] = std::move(value));
    parent.push_back(std::move(value));
    return &parent.back();
  }

  bool add(Json value) {
    place(std::move(value));
    return true;
  }

  bool open(Json value) {
    if (stack_.size() >= kMaxDepth)
      return fail(concat("nested deeper than ", kMaxDepth, " levels"));
    stack_.push_back(place(std::move(value)));
    return true;
  }

  bool close() {
    stack_.pop_back();
    return true;
  }

  Json root_;
  std::vector<Json*> stack_;  // the open containers; only the innermost one grows, so they stay put
  std::string key_;
  std::string error_;
};

}  // namespace

Result<Json> parse_json(std::string_view text, std::string_view label) {
  StrictHandler handler;
  if (!Json::sax_parse(text, &handler)) {
    return Status(Code::kCorrupt, concat(label, ": not valid JSON: ", handler.error()));
  }
  return handler.take();
}

}  // namespace sqz
