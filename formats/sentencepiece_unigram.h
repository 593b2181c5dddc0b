// SentencePiece's unigram models: the pieces of the greatest sum of scores.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "formats/byte_trie.h"
#include "formats/sentencepiece_model.h"

namespace sqz {

// Immutable.
class SentencePieceUnigram {
 public:
  explicit SentencePieceUnigram(const SentencePieceModel& model);

  // Appends the pieces of `text`, normalised and valid UTF-8: Viterbi from left to right, with the
  // roundings to float that libsentencepiece 0.1.97 does, because equal sums are common. `model`
  // is the constructor's. Memory: 12 bytes for each of the text.
  void encode(const SentencePieceModel& model, std::string_view text,
              std::vector<int32_t>& out) const;

 private:
  struct Best;  // the best way to a place of the text
  void extend(std::string_view text, size_t begin, std::vector<Best>& best) const;

  struct Piece {
    float score;
    bool user_defined;
  };
  ByteTrie trie_;              // of the pieces that text may become
  std::vector<Piece> pieces_;  // by id
  float unknown_score_ = 0;
  float best_score_ = 0;
  int32_t unk_ = -1;
};

}  // namespace sqz
