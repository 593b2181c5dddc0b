#include "formats/sentencepiece_unigram.h"

#include <algorithm>
#include <limits>

#include "formats/utf8.h"

namespace sqz {

struct SentencePieceUnigram::Best {
  float score = 0;
  int32_t id = -1;  // of the last piece; -1 while no way is known
  uint32_t length = 0;
};

SentencePieceUnigram::SentencePieceUnigram(const SentencePieceModel& model) : unk_(model.unk) {
  constexpr float kUnknownPenalty = 10;
  float worst = std::numeric_limits<float>::max();
  best_score_ = std::numeric_limits<float>::min();
  for (size_t id = 0; id < model.pieces.size(); ++id) {
    const SentencePiece& piece = model.pieces[id];
    const bool user_defined = piece.type == SentencePiece::Type::kUserDefined;
    pieces_.push_back({piece.score, user_defined});
    if (piece.type == SentencePiece::Type::kNormal) {
      worst = std::min(worst, piece.score);
      best_score_ = std::max(best_score_, piece.score);
    } else if (!user_defined) {
      continue;
    }
    trie_.insert(piece.text, static_cast<int32_t>(id));
  }
  unknown_score_ = worst - kUnknownPenalty;
}

// Tries every piece that begins at `begin`; where none is as long as the character there, the
// unknown piece.
void SentencePieceUnigram::extend(std::string_view text, size_t begin,
                                  std::vector<Best>& best) const {
  const auto offer = [&](size_t length, int32_t id, double score) {
    Best& end = best[begin + length];
    if (end.id < 0 || score > end.score) {
      end = {static_cast<float>(score), id, static_cast<uint32_t>(length)};
    }
  };
  const size_t character = utf8_length(text[begin]);
  const float so_far = best[begin].score;
  bool covered = false;
  int32_t node = 0;
  for (size_t end = begin; end < text.size();) {
    node = trie_.step(node, text[end++]);
    if (node == ByteTrie::kNone) break;
    const int32_t id = trie_.value(node);
    if (id == ByteTrie::kNone) continue;
    const size_t length = end - begin;
    const Piece& piece = pieces_[static_cast<size_t>(id)];
    // User-defined pieces cost less than any other way over the same bytes.
    const double score = piece.user_defined
                             ? static_cast<double>(static_cast<float>(length) * best_score_) - 0.1
                             : static_cast<double>(piece.score);
    offer(length, id, score + static_cast<double>(so_far));
    covered = covered || length == character;
  }
  if (!covered) offer(character, unk_, static_cast<double>(unknown_score_ + so_far));
}

void SentencePieceUnigram::encode(const SentencePieceModel& model, std::string_view text,
                                  std::vector<int32_t>& out) const {
  std::vector<Best> best(text.size() + 1);
  for (size_t begin = 0; begin < text.size(); begin += utf8_length(text[begin])) {
    extend(text, begin, best);
  }
  std::vector<size_t> ends;
  for (size_t end = text.size(); end > 0; end -= best[end].length) ends.push_back(end);
  for (auto end = ends.rbegin(); end != ends.rend(); ++end) {
    const Best& last = best[*end];
    if (last.id == unk_) {
      model.append_unknown(text.substr(*end - last.length, last.length), out);
    } else {
      out.push_back(last.id);
    }
  }
}

}  // namespace sqz
