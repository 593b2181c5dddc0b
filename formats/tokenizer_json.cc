#include <algorithm>
#include <unordered_map>

#include "formats/base/hash.h"
#include "formats/bpe.h"
#include "formats/tokenizer.h"
#include "formats/tokenizer_added.h"
#include "formats/tokenizer_steps.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

// Bytes of a text that is encoded, at most. Symbols of one word are counted with 32 bits, and
// byte-level text is at most twice as long.
constexpr size_t kLongestText = size_t{1} << 30;

struct TokenText {
  std::string text;
  bool special = false;
};

class JsonTokenizer : public Tokenizer {
 public:
  static Result<std::unique_ptr<Tokenizer>> make(const JsonObject& root, std::string hash) {
    SQZ_ASSIGN_OR_RETURN(const std::string version, root.string_or("version", "1.0"));
    if (version != "1.0") return root.unsupported("version", in_quotes(version));
    SQZ_ASSIGN_OR_RETURN(const JsonObject model, root.object("model"));
    SQZ_ASSIGN_OR_RETURN(Bpe bpe, Bpe::parse(model));
    std::unique_ptr<JsonTokenizer> self(new JsonTokenizer(std::move(bpe)));
    SQZ_ASSIGN_OR_RETURN(self->normalizer_, root.optional("normalizer", parse_normalizer));
    SQZ_ASSIGN_OR_RETURN(self->pre_tokenizer_, root.optional("pre_tokenizer", parse_pre_tokenizer));
    SQZ_ASSIGN_OR_RETURN(self->decoder_, root.optional("decoder", parse_decoder));
    SQZ_ASSIGN_OR_RETURN(self->affixes_, root.optional("post_processor", parse_post_processor));
    SQZ_ASSIGN_OR_RETURN(self->added_, AddedTokens::parse(root, self->normalizer_));
    SQZ_RETURN_IF_ERROR(self->index_tokens(root));
    self->hash_ = std::move(hash);
    return Result<std::unique_ptr<Tokenizer>>(std::move(self));
  }

  Status encode(std::string_view text, bool add_special, std::vector<int32_t>& ids) const override {
    const TextPart part{text};
    return encode_text({&part, 1}, add_special, ids);
  }
  Status encode_parts(std::span<const TextPart> parts, std::vector<int32_t>& ids) const override {
    return encode_text(parts, false, ids);
  }
  Result<std::string> decode(std::span<const int32_t> ids, bool keep_special) const override {
    const auto text_of = [&]() -> Result<std::string> {
      std::vector<std::string> tokens;
      tokens.reserve(ids.size());
      for (size_t i = 0; i < ids.size(); ++i) {
        const auto it = tokens_.find(ids[i]);
        if (it == tokens_.end()) {
          return Refuse{"ids", Code::kInvalidArgument}(concat('[', i, ']'), ids[i],
                                                       "the id of a token of the vocabulary");
        }
        if (keep_special || !it->second.special) tokens.push_back(it->second.text);
      }
      if (decoder_) SQZ_RETURN_IF_ERROR(decoder_(tokens));
      std::string text;
      for (size_t i = 0; i < tokens.size(); ++i) {
        // Without a decoder `tokenizers` puts spaces between tokens.
        if (i > 0 && !decoder_) text += ' ';
        text += tokens[i];
      }
      return text;
    };
    return within_memory(text_of, "out of memory while decoding ", ids.size(), " ids");
  }

  int64_t vocab_size() const override { return vocab_size_; }
  std::optional<int32_t> token_to_id(std::string_view token) const override {
    if (const auto it = added_ids_.find(token); it != added_ids_.end()) return it->second;
    if (const auto it = bpe_.vocab().find(token); it != bpe_.vocab().end()) return it->second;
    return std::nullopt;
  }

  std::optional<int32_t> bos_token() const override {
    if (affixes_.before.empty()) return std::nullopt;
    return affixes_.before.front();
  }
  const std::string& hash() const override { return hash_; }

 private:
  explicit JsonTokenizer(Bpe bpe) : bpe_(std::move(bpe)) {}

  Status index_tokens(const JsonObject& root) {
    for (const auto& [token, id] : bpe_.vocab()) tokens_.emplace(id, TokenText{token, false});
    for (size_t i = 0; i < added_.tokens().size(); ++i) {
      const AddedToken& token = added_.tokens()[i];
      const std::string field = concat("added_tokens[", i, "].id");
      if (const auto known = token_to_id(token.content); known && *known != token.id) {
        return root.bad(field, concat(token.id),
                        concat(*known, ", the id of ", in_quotes(token.content), " elsewhere"));
      }
      const auto [it, fresh] = tokens_.try_emplace(token.id);
      if (!fresh && token_to_id(token.content) != token.id) {
        return root.bad(
            field, concat(token.id),
            concat("an id of its own, but ", in_quotes(it->second.text), " has it too"));
      }
      it->second = {token.pattern, token.special};
      added_ids_[token.content] = token.id;
    }
    for (const auto& [id, token] : tokens_) {
      vocab_size_ = std::max(vocab_size_, int64_t{id} + 1);
    }
    std::vector<int32_t> ids = affixes_.before;
    ids.insert(ids.end(), affixes_.after.begin(), affixes_.after.end());
    for (const int32_t id : ids) {
      if (tokens_.contains(id)) continue;
      return root.bad("post_processor.special_tokens", concat("id ", id),
                      "the id of a token of this file");
    }
    return {};
  }

  Status encode_text(std::span<const TextPart> parts, bool add_special,
                     std::vector<int32_t>& ids) const {
    size_t bytes = 0;
    for (const TextPart& part : parts) {
      if (const auto offset = find_invalid_utf8(part.text)) {
        return {Code::kInvalidArgument, concat("text: not valid UTF-8 at byte ", *offset)};
      }
      bytes += part.text.size();
    }
    if (bytes > kLongestText) {
      return Refuse{"text", Code::kInvalidArgument}("length", concat(bytes, " bytes"),
                                                    "at most 1 GiB");
    }
    const size_t before = ids.size();
    const auto add = [&](const std::vector<int32_t>& special) {
      if (add_special) ids.insert(ids.end(), special.begin(), special.end());
    };
    const auto encode_all = [&] {
      add(affixes_.before);
      SQZ_RETURN_IF_ERROR(encode_pieces(parts, ids));
      add(affixes_.after);
      return Status();
    };
    Status status = within_memory(encode_all, "out of memory while encoding ", bytes, " bytes");
    if (!status.ok()) ids.resize(before);
    return status;
  }

  Status encode_pieces(std::span<const TextPart> parts, std::vector<int32_t>& ids) const {
    TextStore store;
    std::vector<Piece> pieces;
    SQZ_RETURN_IF_ERROR(added_.extract(parts, normalizer_, pieces, store));
    if (pre_tokenizer_) SQZ_RETURN_IF_ERROR(pre_tokenizer_(pieces, store));
    BpeEncoder encoder(bpe_);
    for (const Piece& piece : pieces) {
      if (piece.token >= 0) {
        ids.push_back(piece.token);
      } else {
        encoder.encode(piece.text, ids);
      }
    }
    return {};
  }

  Bpe bpe_;
  Normalizer normalizer_;  // may be empty, as the two below
  PreTokenizer pre_tokenizer_;
  Decoder decoder_;
  AddedTokens added_;
  SpecialAffixes affixes_;
  TokenMap<int32_t> added_ids_;
  // Not a vector: ids come from the file and may be far apart.
  std::unordered_map<int32_t, TokenText> tokens_;
  int64_t vocab_size_ = 0;
  std::string hash_;
};

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::parse(std::string_view json,
                                                    const std::string& label) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument document, parse_json(json, label));
  if (!document.root().is_object()) {
    return Refuse{label}("the document", found_text(document.root()), "an object");
  }
  return JsonTokenizer::make({document.root(), label, ""},
                             hex(xxh3_64(std::as_bytes(std::span(json)))));
}

}  // namespace sqz
