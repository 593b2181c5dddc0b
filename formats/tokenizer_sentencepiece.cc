#include "formats/tokenizer_sentencepiece.h"

#include <sentencepiece_processor.h>

#include <exception>
#include <new>

#include "formats/base/hash.h"
#include "formats/utf8.h"

namespace sqz {
namespace {

std::string not_a_model(const std::string& path, const std::string& found) {
  return bad_field(path, "content", found, "a SentencePiece model");
}

class SentencePieceTokenizer : public Tokenizer {
 public:
  static Result<std::unique_ptr<Tokenizer>> parse(std::string_view bytes, const std::string& path) {
    std::unique_ptr<SentencePieceTokenizer> self(new SentencePieceTokenizer);
    // An empty message is a legal protobuf, so the library would take an empty file for a model.
    if (bytes.empty()) return Status(Code::kCorrupt, not_a_model(path, "an empty file"));
    const auto status = self->processor_.LoadFromSerializedProto(bytes);
    if (!status.ok())
      return Status(Code::kCorrupt, not_a_model(path, concat('"', status.message(), '"')));
    if (self->processor_.GetPieceSize() <= 0) {
      return Status(Code::kCorrupt, not_a_model(path, "no vocabulary"));
    }
    self->hash_ = hex(xxh3_64(std::as_bytes(std::span(bytes))));
    return Result<std::unique_ptr<Tokenizer>>(std::move(self));
  }

  Status encode(std::string_view text, bool add_special, std::vector<int32_t>& ids) const override {
    if (const auto offset = find_invalid_utf8(text)) {
      return {Code::kInvalidArgument, concat("text: not valid UTF-8 at byte ", *offset)};
    }
    try {
      std::vector<int> pieces;
      const auto status = processor_.Encode(text, &pieces);
      if (!status.ok()) return {Code::kInternal, concat("sentencepiece: ", status.message())};
      const auto bos = bos_token();
      if (add_special && bos) ids.push_back(*bos);
      ids.insert(ids.end(), pieces.begin(), pieces.end());
    } catch (const std::bad_alloc&) {
      return {Code::kOutOfMemory, concat("out of memory while encoding ", text.size(), " bytes")};
    } catch (const std::exception& error) {
      return {Code::kInternal, concat("sentencepiece: ", error.what())};
    }
    return {};
  }

  Result<std::string> decode(std::span<const int32_t> ids, bool keep_special) const override {
    for (size_t i = 0; i < ids.size(); ++i) {
      if (ids[i] < 0 || ids[i] >= processor_.GetPieceSize()) {
        return Status(Code::kInvalidArgument, bad_field("ids", concat('[', i, ']'), concat(ids[i]),
                                                        "the id of a token of the vocabulary"));
      }
    }
    try {
      const auto decoded =
          processor_.DecodeIdsAsImmutableProto(std::vector<int>(ids.begin(), ids.end()));
      std::string text;
      for (const auto& piece : decoded.pieces()) {
        const bool control = processor_.IsControl(static_cast<int>(piece.id()));
        text += control && keep_special ? piece.piece() : piece.surface();
      }
      return text;
    } catch (const std::bad_alloc&) {
      return Status(Code::kOutOfMemory,
                    concat("out of memory while decoding ", ids.size(), " ids"));
    } catch (const std::exception& error) {
      return Status(Code::kInternal, concat("sentencepiece: ", error.what()));
    }
  }

  int64_t vocab_size() const override { return processor_.GetPieceSize(); }

  std::optional<int32_t> token_to_id(std::string_view token) const override {
    // PieceToId answers with the unknown piece for what it does not have.
    const int id = processor_.PieceToId(token);
    if (id < 0 || processor_.IdToPiece(id) != token) return std::nullopt;
    return id;
  }

  std::optional<int32_t> bos_token() const override {
    const int id = processor_.bos_id();
    return id < 0 ? std::nullopt : std::optional<int32_t>(id);
  }

  const std::string& hash() const override { return hash_; }

 private:
  SentencePieceTokenizer() = default;

  sentencepiece::SentencePieceProcessor processor_;
  std::string hash_;
};

}  // namespace

Result<std::unique_ptr<Tokenizer>> load_sentencepiece(std::string_view bytes,
                                                      const std::string& path) {
  return SentencePieceTokenizer::parse(bytes, path);
}

}  // namespace sqz
