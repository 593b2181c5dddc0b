
#include "formats/bpe.h"
#include "formats/utf8.h"

namespace sqz {

Status Bpe::parse_options(const JsonObject& model) {
  // Files older than the field have no type; they are BPE if they have merges.
  SQZ_ASSIGN_OR_RETURN(const std::string type, model.string_or("type", "BPE"));
  if (type != "BPE") return model.unsupported("type", concat("model ", quote_text(type)));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    SQZ_ASSIGN_OR_RETURN(const std::string affix, model.string_or(key, ""));
    if (!affix.empty()) return model.unsupported(key, quote_text(affix));
  }
  if (model.has("dropout")) {
    const JsonValue& dropout = *model.value.find("dropout");
    if (!dropout.is_number()) return model.bad("dropout", describe_json(dropout), "a number");
    if (dropout.number() != 0) return model.unsupported("dropout", JsonText(dropout).str());
  }
  SQZ_ASSIGN_OR_RETURN(fuse_unk_, model.boolean("fuse_unk", false));
  SQZ_ASSIGN_OR_RETURN(byte_fallback_, model.boolean("byte_fallback", false));
  SQZ_ASSIGN_OR_RETURN(ignore_merges_, model.boolean("ignore_merges", false));
  return {};
}

Status Bpe::parse_vocab(const JsonObject& model) {
  SQZ_ASSIGN_OR_RETURN(const JsonObject vocab, model.object("vocab"));
  if (vocab.value.size() == 0) return model.bad("vocab", "an empty object", "at least one token");
  vocab_.reserve(vocab.value.size());
  std::unordered_map<int32_t, std::string_view> seen;
  seen.reserve(vocab.value.size());
  for (const JsonValue& value : vocab.value.items()) {
    const std::string_view token = value.key();
    const std::string field = concat("model.vocab[", quote_text(token), ']');
    SQZ_ASSIGN_OR_RETURN(const int32_t id, json_token_id(value, model.file, field));
    const auto stored = vocab_.emplace(token, id).first;
    const auto [other, fresh] = seen.emplace(id, stored->first);
    if (!fresh) {
      return Refuse{model.file}(
          field, concat("id ", id),
          concat("an id of its own, but ", quote_text(other->second), " has it too"));
    }
  }
  SQZ_ASSIGN_OR_RETURN(const std::string unk, model.string_or("unk_token", ""));
  if (!unk.empty()) {
    unk_ = id_of(unk);
    if (*unk_ < 0) return model.bad("unk_token", quote_text(unk), "a token of the vocabulary");
  }
  return {};
}

void Bpe::add_joint(std::string_view left, std::string_view right) {
  if (left.empty() || right.empty()) return;
  size_t last = previous_char(left, left.size()), first = 0;
  const uint64_t end = next_char(left, last);
  joints_.insert(end << 32 | next_char(right, first));
}

Status Bpe::add_merge(const JsonObject& model, size_t i, std::string_view left,
                      std::string_view right) {
  const auto bad = [&](std::string_view token) {
    return model.bad(concat("merges[", i, ']'), quote_text(token), "a token of the vocabulary");
  };
  const std::string joined = concat(left, right);
  const int32_t a = id_of(left), b = id_of(right), both = id_of(joined);
  if (a < 0 || b < 0 || both < 0) return bad(a < 0 ? left : b < 0 ? right : joined);
  add_joint(left, right);
  merges_.insert(a, b, {static_cast<uint32_t>(i), both});
  return {};
}

Status Bpe::parse_merges(const JsonObject& model) {
  SQZ_ASSIGN_OR_RETURN(const JsonValue* merges, model.array("merges"));
  merges_.reserve(merges->size());
  for (size_t i = 0; i < merges->size(); ++i) {
    const JsonValue& merge = (*merges)[i];
    if (merge.is_string()) {
      const std::string_view text = merge.string();
      const size_t space = text.find(' ');
      if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
        return model.bad(concat("merges[", i, ']'), quote_text(text), "two tokens and one space");
      }
      SQZ_RETURN_IF_ERROR(add_merge(model, i, text.substr(0, space), text.substr(space + 1)));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      SQZ_RETURN_IF_ERROR(add_merge(model, i, merge[0].string(), merge[1].string()));
    } else {
      return model.bad(concat("merges[", i, ']'), describe_json(merge),
                       "\"a b\" or [\"a\", \"b\"]");
    }
  }
  return {};
}

void Bpe::index_common_characters() {
  for (uint32_t code = 0; code < common_characters_.size(); ++code) {
    std::string character;
    append_utf8(code, character);
    common_characters_[code] = id_of(character);
  }
}

void Bpe::index_byte_tokens() {
  constexpr char kDigits[] = "0123456789ABCDEF";
  for (size_t byte = 0; byte < byte_tokens_.size(); ++byte) {
    byte_tokens_[byte] = id_of(concat("<0x", kDigits[byte >> 4], kDigits[byte & 15], '>'));
  }
}

Result<Bpe> Bpe::parse(const JsonObject& model) {
  Bpe bpe;
  SQZ_RETURN_IF_ERROR(bpe.parse_options(model));
  SQZ_RETURN_IF_ERROR(bpe.parse_vocab(model));
  SQZ_RETURN_IF_ERROR(bpe.parse_merges(model));
  bpe.index_common_characters();
  bpe.index_byte_tokens();
  return bpe;
}

}  // namespace sqz
