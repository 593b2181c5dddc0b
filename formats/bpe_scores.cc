#include <algorithm>

#include "formats/bpe.h"
#include "formats/utf8.h"

namespace sqz {

template <class Visit>
void Bpe::each_split(std::string_view text, Visit visit) const {
  for (size_t cut = utf8_length(text[0]); cut < text.size(); cut += utf8_length(text[cut])) {
    const auto left = vocab_.find(text.substr(0, cut));
    const auto right = vocab_.find(text.substr(cut));
    if (left != vocab_.end() && right != vocab_.end()) visit(*left, *right);
  }
}

Bpe Bpe::from_scores(std::vector<ScoredPiece> pieces, int32_t unk,
                     const std::array<int32_t, 256>* byte_tokens, int32_t first_stray,
                     std::vector<std::string>& strays) {
  Bpe bpe;
  bpe.byte_fallback_ = byte_tokens != nullptr;
  bpe.byte_tokens_.fill(-1);
  if (byte_tokens != nullptr) bpe.byte_tokens_ = *byte_tokens;
  bpe.unk_ = unk;
  bpe.fuse_unk_ = true;

  bpe.vocab_.reserve(pieces.size());
  for (const ScoredPiece& piece : pieces) bpe.vocab_.emplace(piece.text, piece.id);
  for (const ScoredPiece& piece : pieces) {
    for (size_t offset = 0; offset < piece.text.size();) {
      const std::string character(piece.text.substr(offset, utf8_length(piece.text[offset])));
      offset += character.size();
      const auto id = first_stray + static_cast<int32_t>(strays.size());
      if (bpe.vocab_.emplace(character, id).second) strays.push_back(character);
    }
  }
  bpe.index_common_characters();

  size_t count = 0;
  for (const ScoredPiece& piece : pieces) {
    bpe.each_split(piece.text, [&](const auto&, const auto&) { ++count; });
  }
  bpe.merges_.reserve(count);
  std::stable_sort(pieces.begin(), pieces.end(),
                   [](const ScoredPiece& a, const ScoredPiece& b) { return a.score > b.score; });
  uint32_t rank = 0;
  for (size_t i = 0; i < pieces.size(); ++i) {
    // Equal scores are one rank: the leftmost pair is joined first.
    if (i > 0 && pieces[i].score != pieces[i - 1].score) ++rank;
    bpe.each_split(pieces[i].text, [&](const auto& left, const auto& right) {
      bpe.add_joint(left.first, right.first);
      bpe.merges_.insert(left.second, right.second, {rank, pieces[i].id});
    });
  }
  return bpe;
}

}  // namespace sqz
