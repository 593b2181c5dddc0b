#include "formats/tokenizer_decoder.h"

#include <charconv>

#include "formats/pretokenizer.h"
#include "formats/tokenizer_normalizer.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

class SequenceDecoder : public Decoder {
 public:
  explicit SequenceDecoder(std::vector<std::unique_ptr<Decoder>> steps)
      : steps_(std::move(steps)) {}
  Status apply(std::vector<std::string>& tokens) const override {
    for (const auto& step : steps_) SQZ_RETURN_IF_ERROR(step->apply(tokens));
    return {};
  }

 private:
  std::vector<std::unique_ptr<Decoder>> steps_;
};

class ByteLevelDecoder : public Decoder {
 public:
  Status apply(std::vector<std::string>& tokens) const override {
    std::string bytes;
    for (const std::string& token : tokens) {
      if (!append_byte_level_decoded(token, bytes)) bytes += token;
    }
    tokens.assign(1, utf8_lossy(std::move(bytes)));
    return {};
  }
};

class FuseDecoder : public Decoder {
 public:
  Status apply(std::vector<std::string>& tokens) const override {
    std::string joined;
    for (const std::string& token : tokens) joined += token;
    tokens.assign(1, std::move(joined));
    return {};
  }
};

class ReplaceDecoder : public Decoder {
 public:
  ReplaceDecoder(Regex pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}
  Status apply(std::vector<std::string>& tokens) const override {
    RegexMatcher matcher(pattern_);
    for (std::string& token : tokens) {
      SQZ_RETURN_IF_ERROR(replace_matches(matcher, content_, token));
    }
    return {};
  }

 private:
  Regex pattern_;
  std::string content_;
};

// Runs of <0xNN> tokens become the text of their bytes, or one U+FFFD each if they form none.
class ByteFallbackDecoder : public Decoder {
 public:
  Status apply(std::vector<std::string>& tokens) const override {
    std::vector<std::string> out;
    std::string bytes;
    const auto flush = [&] {
      if (!find_invalid_utf8(bytes)) {
        if (!bytes.empty()) out.push_back(bytes);
      } else {
        for (size_t i = 0; i < bytes.size(); ++i) out.emplace_back("\xef\xbf\xbd");
      }
      bytes.clear();
    };
    for (std::string& token : tokens) {
      if (const int byte = byte_of(token); byte >= 0) {
        bytes.push_back(static_cast<char>(byte));
      } else {
        flush();
        out.push_back(std::move(token));
      }
    }
    flush();
    tokens = std::move(out);
    return {};
  }

 private:
  static int byte_of(std::string_view token) {
    if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
    int byte = -1;
    const char* end = token.data() + 5;
    const auto [stop, error] = std::from_chars(token.data() + 3, end, byte, 16);
    return error == std::errc() && stop == end ? byte : -1;
  }
};

class StripDecoder : public Decoder {
 public:
  StripDecoder(std::string content, size_t start, size_t stop)
      : content_(std::move(content)), start_(start), stop_(stop) {}
  Status apply(std::vector<std::string>& tokens) const override {
    for (std::string& token : tokens) {
      std::string_view left = token;
      for (size_t i = 0; i < start_ && left.starts_with(content_); ++i) {
        left.remove_prefix(content_.size());
      }
      for (size_t i = 0; i < stop_ && left.ends_with(content_); ++i) {
        left.remove_suffix(content_.size());
      }
      token = std::string(left);
    }
    return {};
  }

 private:
  std::string content_;
  size_t start_;
  size_t stop_;
};

class MetaspaceDecoder : public Decoder {
 public:
  MetaspaceDecoder(std::string replacement, bool drop_first)
      : replacement_(std::move(replacement)), drop_first_(drop_first) {}
  Status apply(std::vector<std::string>& tokens) const override {
    for (size_t i = 0; i < tokens.size(); ++i) {
      std::string out;
      const std::string_view token = tokens[i];
      for (size_t at = 0; at < token.size();) {
        const std::string_view character = token.substr(at, utf8_length(token[at]));
        at += character.size();
        if (character != replacement_) {
          out += character;
        } else if (i > 0 || !drop_first_) {
          out += ' ';
        }
      }
      tokens[i] = std::move(out);
    }
    return {};
  }

 private:
  std::string replacement_;
  bool drop_first_;
};

using Parsed = Result<std::unique_ptr<Decoder>>;

Result<size_t> parse_count(const JsonObject& object, std::string_view key) {
  SQZ_ASSIGN_OR_RETURN(const int32_t count, object.token_id(key));
  return static_cast<size_t>(count);
}

Parsed parse_strip(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(std::string content, object.string("content"));
  if (content.empty()) return object.bad("content", "an empty string", "one character");
  SQZ_ASSIGN_OR_RETURN(const size_t start, parse_count(object, "start"));
  SQZ_ASSIGN_OR_RETURN(const size_t stop, parse_count(object, "stop"));
  return Parsed(std::make_unique<StripDecoder>(std::move(content), start, stop));
}

Parsed parse_metaspace(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(std::string replacement, object.string("replacement"));
  SQZ_ASSIGN_OR_RETURN(const bool add_prefix_space, object.boolean("add_prefix_space", true));
  SQZ_ASSIGN_OR_RETURN(const std::string scheme,
                       object.string_or("prepend_scheme", add_prefix_space ? "always" : "never"));
  return Parsed(std::make_unique<MetaspaceDecoder>(std::move(replacement), scheme != "never"));
}

Parsed parse_replace(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string pattern, parse_pattern(object));
  SQZ_ASSIGN_OR_RETURN(std::string content, object.string("content"));
  SQZ_ASSIGN_OR_RETURN(
      Regex regex, Regex::compile(pattern, concat(object.file, ": ", object.name_of("pattern"))));
  return Parsed(std::make_unique<ReplaceDecoder>(std::move(regex), std::move(content)));
}

Parsed parse_object(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string type, object.string("type"));
  if (type == "ByteLevel") return Parsed(std::make_unique<ByteLevelDecoder>());
  if (type == "ByteFallback") return Parsed(std::make_unique<ByteFallbackDecoder>());
  if (type == "Fuse") return Parsed(std::make_unique<FuseDecoder>());
  if (type == "Replace") return parse_replace(object);
  if (type == "Strip") return parse_strip(object);
  if (type == "Metaspace") return parse_metaspace(object);
  if (type != "Sequence") return object.unsupported("type", concat("decoder ", quote_text(type)));
  SQZ_ASSIGN_OR_RETURN(const JsonValue* items, object.array("decoders"));
  std::vector<std::unique_ptr<Decoder>> steps;
  for (size_t i = 0; i < items->size(); ++i) {
    SQZ_ASSIGN_OR_RETURN(const JsonObject item, object.element("decoders", i));
    SQZ_ASSIGN_OR_RETURN(auto step, parse_object(item));
    steps.push_back(std::move(step));
  }
  return Parsed(std::make_unique<SequenceDecoder>(std::move(steps)));
}

}  // namespace

Parsed Decoder::parse(const JsonObject& owner, std::string_view key) {
  if (!owner.has(key)) return Parsed(nullptr);
  SQZ_ASSIGN_OR_RETURN(const JsonObject object, owner.object(key));
  return parse_object(object);
}

}  // namespace sqz
