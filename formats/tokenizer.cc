#include "formats/tokenizer.h"

#include <algorithm>
#include <exception>
#include <filesystem>
#include <new>
#include <unordered_map>

#include "formats/base/hash.h"
#include "formats/bpe.h"
#include "formats/tokenizer_added.h"
#include "formats/tokenizer_steps.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr uint64_t kLargestFile = uint64_t{1} << 30;
// Bytes of a text that is encoded, at most. Symbols of one word are counted with 32 bits, and
// byte-level text is at most twice as long.
constexpr size_t kLongestText = size_t{1} << 30;

struct TokenText {
  std::string text;
  bool special = false;
};

class JsonTokenizer : public Tokenizer {
 public:
  static Result<std::unique_ptr<Tokenizer>> make(JsonFields root, std::string hash) {
    if (root.text("version", "1.0") != "1.0") root.complain("version", "1.0", Code::kUnsupported);
    SQZ_RETURN_IF_ERROR(root.status());
    SQZ_ASSIGN_OR_RETURN(Bpe bpe, Bpe::parse(root.object("model")));
    std::unique_ptr<JsonTokenizer> self(new JsonTokenizer(std::move(bpe)));
    const auto parse = [&](const char* key, auto parse_step, auto& steps) {
      return root.has(key) ? parse_step(root.object(key), steps) : Status();
    };
    std::vector<SpecialAffixes> affixes;
    SQZ_RETURN_IF_ERROR(parse("normalizer", parse_normalizer, self->normalizers_));
    SQZ_RETURN_IF_ERROR(parse("pre_tokenizer", parse_pre_tokenizer, self->pre_tokenizers_));
    SQZ_RETURN_IF_ERROR(parse("decoder", parse_decoder, self->decoders_));
    SQZ_RETURN_IF_ERROR(parse("post_processor", parse_post_processor, affixes));
    self->has_decoder_ = root.has("decoder");
    for (const SpecialAffixes& outer : affixes) {
      std::vector<int32_t>&before = self->affixes_.before, &after = self->affixes_.after;
      before.insert(before.begin(), outer.before.begin(), outer.before.end());
      after.insert(after.end(), outer.after.begin(), outer.after.end());
    }
    SQZ_ASSIGN_OR_RETURN(self->added_, AddedTokens::parse(root, self->normalizers_));
    self->index_tokens(root);
    SQZ_RETURN_IF_ERROR(root.status());
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
      for (const Decoder& decode_step : decoders_) decode_step(tokens);
      std::string text;
      for (size_t i = 0; i < tokens.size(); ++i) {
        // Without a decoder `tokenizers` puts spaces between tokens.
        if (i > 0 && !has_decoder_) text += ' ';
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

  void index_tokens(JsonFields& root) {
    for (const auto& [token, id] : bpe_.vocab()) tokens_.emplace(id, TokenText{token, false});
    for (size_t i = 0; i < added_.tokens().size(); ++i) {
      const AddedToken& token = added_.tokens()[i];
      const auto complain = [&](const std::string& expected) {
        root.complain_of(concat("added_tokens[", i, "].id"), concat(token.id), expected);
      };
      const auto known = token_to_id(token.content);
      if (known && *known != token.id) {
        return complain(concat(*known, ", the id of ", in_quotes(token.content), " elsewhere"));
      }
      const auto [it, fresh] = tokens_.try_emplace(token.id);
      if (!fresh && !known) {
        return complain(
            concat("an id of its own, but ", in_quotes(it->second.text), " has it too"));
      }
      it->second = {token.pattern, token.special};
      added_ids_[token.content] = token.id;
    }
    for (const auto& [id, token] : tokens_) vocab_size_ = std::max(vocab_size_, int64_t{id} + 1);
    for (const std::vector<int32_t>* ids : {&affixes_.before, &affixes_.after}) {
      for (const int32_t id : *ids) {
        if (tokens_.contains(id)) continue;
        root.complain_of("post_processor.special_tokens", concat("id ", id),
                         "the id of a token of this file");
      }
    }
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
    added_.extract(parts, normalizers_, pieces, store);
    for (const PreTokenizer& cut : pre_tokenizers_) SQZ_RETURN_IF_ERROR(cut(pieces, store));
    BpeEncoder encoder(bpe_);
    for (const Piece& piece : pieces) {
      piece.token >= 0 ? ids.push_back(piece.token) : encoder.encode(piece.text, ids);
    }
    return {};
  }

  Bpe bpe_;
  std::vector<Normalizer> normalizers_;
  std::vector<PreTokenizer> pre_tokenizers_;
  std::vector<Decoder> decoders_;
  bool has_decoder_ = false;
  AddedTokens added_;
  SpecialAffixes affixes_;
  TokenMap added_ids_;
  // Not a vector: ids come from the file and may be far apart.
  std::unordered_map<int32_t, TokenText> tokens_;
  int64_t vocab_size_ = 0;
  std::string hash_;
};

Result<std::string> find_file(const std::string& path, Env& env) {
  if (std::string inside = concat(path, "/tokenizer.json"); env.exists(inside)) return inside;
  std::error_code error;
  if (!std::filesystem::is_directory(path, error) && !path.ends_with("tokenizer.model")) {
    return path;
  }
  if (path.ends_with("tokenizer.model") || env.exists(concat(path, "/tokenizer.model"))) {
    return Status(Code::kUnsupported,
                  concat(path,
                         ": found tokenizer.model alone, expected tokenizer.json; "
                         "transformers makes it: AutoTokenizer.from_pretrained(folder)"
                         ".save_pretrained(folder)"));
  }
  return Status(Code::kNotFound, concat(path, ": no tokenizer.json"));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::parse(std::string_view json,
                                                    const std::string& label) {
  SQZ_ASSIGN_OR_RETURN(const JsonDocument document, parse_json_object(json, label));
  return JsonTokenizer::make(JsonFields(document.root(), label),
                             hex(xxh3_64(std::as_bytes(std::span(json)))));
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& path, Env& env) {
  try {
    SQZ_ASSIGN_OR_RETURN(const std::string file, find_file(path, env));
    SQZ_ASSIGN_OR_RETURN(const std::string bytes, read_text_file(env, file, kLargestFile));
    return parse(bytes, file);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, concat(path, ": out of memory while loading the tokenizer"));
  } catch (const std::exception& error) {
    return Status(Code::kInternal, concat(path, ": ", error.what()));
  }
}

}  // namespace sqz
