#include "formats/tokenizer_steps.h"

#include <charconv>

#include "formats/utf8.h"

namespace sqz {
namespace {

using Tokens = std::vector<std::string>;

Status decode_byte_level(Tokens& tokens) {
  std::string bytes;
  for (const std::string& token : tokens) {
    if (!append_byte_level_decoded(token, bytes)) bytes += token;
  }
  tokens.assign(1, utf8_lossy(std::move(bytes)));
  return {};
}

Status fuse(Tokens& tokens) {
  std::string joined;
  for (const std::string& token : tokens) joined += token;
  tokens.assign(1, std::move(joined));
  return {};
}

// Of a token "<0xNN>", else -1.
int byte_of(std::string_view token) {
  if (token.size() != 6 || !token.starts_with("<0x") || token[5] != '>') return -1;
  int byte = -1;
  const char* end = token.data() + 5;
  const auto [stop, error] = std::from_chars(token.data() + 3, end, byte, 16);
  return error == std::errc() && stop == end ? byte : -1;
}

// Runs of <0xNN> tokens become the text of their bytes, or one U+FFFD each if they form none.
Status decode_bytes(Tokens& tokens) {
  Tokens out;
  std::string bytes;
  const auto flush = [&] {
    if (!find_invalid_utf8(bytes)) {
      if (!bytes.empty()) out.push_back(bytes);
    } else {
      out.insert(out.end(), bytes.size(), "\xef\xbf\xbd");
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

// `token` without up to `start` and `stop` copies of `content` at its ends.
std::string_view strip(std::string_view token, std::string_view content, int32_t start,
                       int32_t stop) {
  for (int32_t i = 0; i < start && token.starts_with(content); ++i) {
    token.remove_prefix(content.size());
  }
  for (int32_t i = 0; i < stop && token.ends_with(content); ++i) {
    token.remove_suffix(content.size());
  }
  return token;
}

// `token` with `space` in place of each character `replacement`.
std::string replace_character(std::string_view token, std::string_view replacement,
                              std::string_view space) {
  std::string out;
  for (size_t at = 0; at < token.size();) {
    const std::string_view character = token.substr(at, utf8_length(token[at]));
    at += character.size();
    out += character == replacement ? space : character;
  }
  return out;
}

Result<Decoder> strip_decoder(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string content, object.string("content"));
  if (content.empty()) return object.bad("content", "an empty string", "one character");
  SQZ_ASSIGN_OR_RETURN(const int32_t start, object.token_id("start"));
  SQZ_ASSIGN_OR_RETURN(const int32_t stop, object.token_id("stop"));
  return Decoder([=](Tokens& tokens) -> Status {
    for (std::string& token : tokens) token = std::string(strip(token, content, start, stop));
    return {};
  });
}

Result<Decoder> metaspace_decoder(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string replacement, object.string("replacement"));
  SQZ_ASSIGN_OR_RETURN(const bool add_prefix_space, object.boolean("add_prefix_space", true));
  SQZ_ASSIGN_OR_RETURN(const std::string scheme,
                       object.string_or("prepend_scheme", add_prefix_space ? "always" : "never"));
  return Decoder([replacement, drop_first = scheme != "never"](Tokens& tokens) -> Status {
    for (size_t i = 0; i < tokens.size(); ++i) {
      tokens[i] = replace_character(tokens[i], replacement, i == 0 && drop_first ? "" : " ");
    }
    return {};
  });
}

Result<Decoder> replace_decoder(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const Regex pattern, parse_pattern(object));
  SQZ_ASSIGN_OR_RETURN(const std::string content, object.string("content"));
  return Decoder([pattern, content](Tokens& tokens) -> Status {
    RegexMatcher matcher(pattern);
    for (std::string& token : tokens) {
      SQZ_RETURN_IF_ERROR(replace_matches(matcher, content, token));
    }
    return {};
  });
}

}  // namespace

Result<Decoder> parse_decoder(const JsonObject& object) {
  SQZ_ASSIGN_OR_RETURN(const std::string type, object.string("type"));
  if (type == "ByteLevel") return Decoder(decode_byte_level);
  if (type == "ByteFallback") return Decoder(decode_bytes);
  if (type == "Fuse") return Decoder(fuse);
  if (type == "Replace") return replace_decoder(object);
  if (type == "Strip") return strip_decoder(object);
  if (type == "Metaspace") return metaspace_decoder(object);
  if (type != "Sequence") return object.unsupported("type", concat("decoder ", in_quotes(type)));
  SQZ_ASSIGN_OR_RETURN(const auto steps, object.each("decoders", parse_decoder));
  return Decoder([steps](Tokens& tokens) -> Status {
    for (const Decoder& step : steps) SQZ_RETURN_IF_ERROR(step(tokens));
    return {};
  });
}

}  // namespace sqz
