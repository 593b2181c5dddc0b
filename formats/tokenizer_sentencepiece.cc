#include "formats/tokenizer_files.h"

#include "formats/base/hash.h"
#include "formats/bpe.h"
#include "formats/byte_trie.h"
#include "formats/sentencepiece_model.h"
#include "formats/sentencepiece_normalizer.h"
#include "formats/sentencepiece_unigram.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

using Type = SentencePiece::Type;

constexpr std::string_view kSpace = "\u2581";

// The bytes of byte pieces as text; each byte of what is not UTF-8 becomes U+FFFD.
std::string text_of_bytes(std::string_view bytes) {
  std::string out;
  while (const auto bad = find_invalid_utf8(bytes)) {
    out.append(bytes, 0, *bad).append("\ufffd");
    bytes.remove_prefix(*bad + 1);
  }
  return out.append(bytes);
}

class SentencePieceTokenizer : public Tokenizer {
 public:
  static Result<std::unique_ptr<Tokenizer>> parse(std::string_view bytes, const std::string& path) {
    std::unique_ptr<SentencePieceTokenizer> self(new SentencePieceTokenizer);
    SQZ_ASSIGN_OR_RETURN(self->model_, parse_sentencepiece_model(bytes, path));
    const auto& pieces = self->model_.pieces;
    for (size_t id = 0; id < pieces.size(); ++id) {
      if (pieces[id].type != Type::kUserDefined) continue;
      self->symbols_.insert(pieces[id].text, static_cast<int32_t>(id));
    }
    SQZ_ASSIGN_OR_RETURN(self->normalizer_,
                         SentencePieceNormalizer::create(self->model_, self->symbols_, path));
    if (self->model_.kind == SentencePieceModel::Kind::kBpe) {
      self->index_bpe();
    } else {
      self->unigram_.emplace(self->model_);
    }
    self->hash_ = hex(xxh3_64(std::as_bytes(std::span(bytes))));
    return Result<std::unique_ptr<Tokenizer>>(std::move(self));
  }

  Status encode(std::string_view text, bool add_special, std::vector<int32_t>& ids) const override {
    if (text.size() > kLongestText) {
      return {Code::kInvalidArgument,
              concat("text: ", text.size(), " bytes, at most ", kLongestText, " are encoded")};
    }
    if (const auto offset = find_invalid_utf8(text)) {
      return {Code::kInvalidArgument, concat("text: not valid UTF-8 at byte ", *offset)};
    }
    const auto append = [&]() -> Status {
      SQZ_ASSIGN_OR_RETURN(const std::string normalized, normalizer_->apply(text));
      std::vector<int32_t> out;
      if (bpe_) {
        encode_bpe(normalized, out);
      } else {
        unigram_->encode(model_, normalized, out);
      }
      ids.reserve(ids.size() + out.size() + 1);
      if (add_special && model_.bos) ids.push_back(*model_.bos);
      ids.insert(ids.end(), out.begin(), out.end());
      return {};
    };
    return within_memory(append, "out of memory while encoding ", text.size(), " bytes");
  }

  Result<std::string> decode(std::span<const int32_t> ids, bool keep_special) const override {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] >= vocab_size()) {
        return Refuse{"ids", Code::kInvalidArgument}(concat('[', i, ']'), ids[i],
                                                     "the id of a token of the vocabulary");
      }
    }
    const auto text_of = [&]() -> Result<std::string> {
      std::string text;
      std::string bytes;
      bool at_start = true;  // control pieces aside
      bool took_space = false;
      for (int32_t id : ids) {
        const SentencePiece& piece = model_.pieces[static_cast<size_t>(id)];
        if (piece.type == Type::kByte) {
          bytes.push_back(static_cast<char>(std::stoi(piece.text.substr(3, 2), nullptr, 16)));
          continue;
        }
        if (took_space || !bytes.empty()) at_start = false;
        text += text_of_bytes(bytes);
        bytes.clear();
        const std::string surface = surface_of(piece, at_start, took_space);
        if (!surface.empty()) at_start = false;
        text += piece.type == Type::kControl && keep_special ? piece.text : surface;
      }
      return text + text_of_bytes(bytes);
    };
    return within_memory(text_of, "out of memory while decoding ", ids.size(), " ids");
  }

  int64_t vocab_size() const override { return static_cast<int64_t>(model_.pieces.size()); }
  std::optional<int32_t> token_to_id(std::string_view token) const override {
    const auto it = model_.ids.find(token);
    return it == model_.ids.end() ? std::nullopt : std::optional<int32_t>(it->second);
  }
  std::optional<int32_t> bos_token() const override { return model_.bos; }
  const std::string& hash() const override { return hash_; }

 private:
  SentencePieceTokenizer() = default;

  void index_bpe() {
    std::vector<Bpe::ScoredPiece> pieces;
    for (size_t id = 0; id < model_.pieces.size(); ++id) {
      const SentencePiece& piece = model_.pieces[id];
      if (piece.type != Type::kNormal) continue;
      pieces.push_back({piece.text, static_cast<int32_t>(id), piece.score});
    }
    bpe_ = Bpe::from_scores(std::move(pieces), model_.unk,
                            model_.byte_fallback ? &model_.byte_ids : nullptr,
                            static_cast<int32_t>(model_.pieces.size()), strays_);
  }

  void encode_bpe(std::string_view text, std::vector<int32_t>& out) const {
    BpeEncoder encoder(*bpe_);
    std::vector<int32_t> merged;
    const auto flush = [&](std::string_view part) {
      merged.clear();
      encoder.encode(part, merged);
      for (int32_t id : merged) {
        if (id >= vocab_size()) {  // of a character that only occurs within pieces
          model_.append_unknown(strays_[static_cast<size_t>(id - vocab_size())], out);
        } else if (id == model_.unk) {
          model_.append_unknown("", out);
        } else {
          out.push_back(id);
        }
      }
    };
    size_t begin = 0;
    for (size_t at = 0; at < text.size() && !symbols_.empty();) {
      const ByteTrie::Match symbol = symbols_.longest(text.substr(at));
      if (symbol.length == 0) {
        at += utf8_length(text[at]);
        continue;
      }
      flush(text.substr(begin, at - begin));
      out.push_back(symbol.value);
      at += symbol.length;
      begin = at;
    }
    flush(text.substr(begin));
  }

  // The text of a piece that is not a byte. The space that the dummy prefix left at the start is
  // taken away: once, or as often as it is there if the model removes extra white space.
  std::string surface_of(const SentencePiece& piece, bool at_start, bool& took_space) const {
    took_space = false;
    if (piece.type == Type::kControl) return {};
    if (piece.type == Type::kUnknown) return model_.unk_surface;
    std::string_view text = piece.text;
    if (at_start && (model_.add_dummy_prefix || model_.remove_extra_whitespaces) &&
        text.starts_with(kSpace)) {
      text.remove_prefix(kSpace.size());
      took_space = !model_.remove_extra_whitespaces;
    }
    std::string out(text);
    for (size_t at = 0; (at = out.find(kSpace, at)) != std::string::npos; ++at) {
      out.replace(at, kSpace.size(), 1, ' ');
    }
    return out;
  }

  SentencePieceModel model_;
  ByteTrie symbols_;  // the user-defined pieces
  std::optional<SentencePieceNormalizer> normalizer_;
  std::optional<Bpe> bpe_;  // one of the two
  std::optional<SentencePieceUnigram> unigram_;
  std::vector<std::string> strays_;  // the characters of the ids from vocab_size() on
  std::string hash_;
};

}  // namespace

Result<std::unique_ptr<Tokenizer>> load_sentencepiece(std::string_view bytes,
                                                      const std::string& path) {
  return SentencePieceTokenizer::parse(bytes, path);
}

}  // namespace sqz
