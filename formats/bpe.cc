#include "formats/bpe.h"

#include <algorithm>
#include <bit>

#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr uint64_t kNoKey = ~uint64_t{0};  // ids are below 2^31, so no pair has this key
constexpr size_t kLongestCachedWord = 256;
constexpr size_t kMostCachedWords = size_t{1} << 20;

uint64_t pair_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

void Bpe::MergeTable::reserve(size_t count) {
  slots_.assign(std::bit_ceil(2 * count + 1), Slot{kNoKey, {}});
}

size_t Bpe::MergeTable::slot_of(uint64_t key) const {
  uint64_t hash = key * 0x9e3779b97f4a7c15u;
  hash ^= hash >> 32;
  size_t slot = hash & (slots_.size() - 1);
  while (slots_[slot].key != kNoKey && slots_[slot].key != key) {
    slot = (slot + 1) & (slots_.size() - 1);
  }
  return slot;
}

void Bpe::MergeTable::insert(int32_t left, int32_t right, Merge merge) {
  const uint64_t key = pair_key(left, right);
  slots_[slot_of(key)] = {key, merge};
}

const Merge* Bpe::MergeTable::find(int32_t left, int32_t right) const {
  const Slot& slot = slots_[slot_of(pair_key(left, right))];
  return slot.key == kNoKey ? nullptr : &slot.merge;
}

void BpeEncoder::add_symbol(int32_t id) {
  const auto position = static_cast<int32_t>(symbols_.size());
  if (position > 0) symbols_.back().next = position;
  symbols_.push_back({id, position - 1, -1, true});
}

int32_t Bpe::id_of(std::string_view token) const {
  const auto it = vocab_.find(token);
  return it == vocab_.end() ? -1 : it->second;
}

int32_t Bpe::character_id(std::string_view character, uint32_t code) const {
  if (code < common_characters_.size()) return common_characters_[code];
  return id_of(character);
}

// One symbol for each character; characters without a token become byte tokens or the unknown
// token, or vanish, in the order in which `tokenizers` writes them.
void BpeEncoder::make_symbols(std::string_view word) {
  symbols_.clear();
  bool unknown_waits = false;
  for (size_t offset = 0; offset < word.size();) {
    const size_t begin = offset;
    const uint32_t code = next_char(word, offset);
    const std::string_view character = word.substr(begin, offset - begin);
    const int32_t id = bpe_.character_id(character, code);
    if (id >= 0) {
      if (unknown_waits) add_symbol(*bpe_.unk_);
      unknown_waits = false;
      add_symbol(id);
      continue;
    }
    const auto byte_token = [&](char byte) {
      return bpe_.byte_tokens_[static_cast<unsigned char>(byte)];
    };
    if (bpe_.byte_fallback_ && std::all_of(character.begin(), character.end(),
                                           [&](char byte) { return byte_token(byte) >= 0; })) {
      for (char byte : character) add_symbol(byte_token(byte));
      continue;
    }
    if (!bpe_.unk_) continue;
    if (unknown_waits && !bpe_.fuse_unk_) add_symbol(*bpe_.unk_);
    unknown_waits = true;
  }
  if (unknown_waits) add_symbol(*bpe_.unk_);
}

void BpeEncoder::push_candidate(int32_t left) {
  const Symbol& symbol = symbols_[static_cast<size_t>(left)];
  if (symbol.next < 0) return;
  const Merge* merge = bpe_.merges_.find(symbol.id, symbols_[static_cast<size_t>(symbol.next)].id);
  if (merge == nullptr) return;
  heap_.push_back({merge->rank, left, merge->id});
  std::push_heap(heap_.begin(), heap_.end(), std::greater<>());
}

// The symbols are a linked list and candidates are not taken out of the heap when a neighbour
// changes; a candidate is stale unless its pair still merges to its token.
void BpeEncoder::merge_symbols() {
  heap_.clear();
  for (size_t i = 0; i + 1 < symbols_.size(); ++i) push_candidate(static_cast<int32_t>(i));
  while (!heap_.empty()) {
    std::pop_heap(heap_.begin(), heap_.end(), std::greater<>());
    const Candidate top = heap_.back();
    heap_.pop_back();
    Symbol& left = symbols_[static_cast<size_t>(top.position)];
    if (!left.alive || left.next < 0) continue;
    Symbol& right = symbols_[static_cast<size_t>(left.next)];
    const Merge* merge = bpe_.merges_.find(left.id, right.id);
    if (merge == nullptr || merge->id != top.id) continue;
    left.id = top.id;
    left.next = right.next;
    right.alive = false;
    if (left.next >= 0) symbols_[static_cast<size_t>(left.next)].previous = top.position;
    if (left.previous >= 0) push_candidate(left.previous);
    push_candidate(top.position);
  }
}

// The first place behind `from` where no merge can ever reach across, or the word's end: both
// characters are tokens and no merge joins a token that ends in the one to a token that begins with
// the other. Tokens on either side do not depend on each other. A tokenizer without pre-tokenizer
// gives whole books as one word; this cuts them into words that the cache knows.
size_t BpeEncoder::find_cut(std::string_view word, size_t from) const {
  size_t offset = from;
  uint32_t left = next_char(word, offset);
  bool left_known = bpe_.character_id(word.substr(from, offset - from), left) >= 0;
  while (offset < word.size()) {
    const size_t begin = offset;
    const uint32_t right = next_char(word, offset);
    const bool right_known = bpe_.character_id(word.substr(begin, offset - begin), right) >= 0;
    if (left_known && right_known && !bpe_.joints_.contains(uint64_t{left} << 32 | right)) {
      return begin;
    }
    left = right;
    left_known = right_known;
  }
  return word.size();
}

void BpeEncoder::encode(std::string_view word, std::vector<int32_t>& ids) {
  const auto whole = bpe_.ignore_merges_ ? bpe_.vocab_.find(word) : bpe_.vocab_.end();
  if (whole != bpe_.vocab_.end()) {
    ids.push_back(whole->second);
  } else if (word.size() <= kLongestCachedWord) {
    encode_part(word, ids);
  } else {
    for (size_t begin = 0; begin < word.size();) {
      const size_t end = find_cut(word, begin);
      encode_part(word.substr(begin, end - begin), ids);
      begin = end;
    }
  }
}

void BpeEncoder::encode_part(std::string_view part, std::vector<int32_t>& ids) {
  if (part.empty()) return;
  if (const auto hit = cache_.find(part); hit != cache_.end()) {
    const auto begin = cached_ids_.begin() + static_cast<std::ptrdiff_t>(hit->second.begin);
    ids.insert(ids.end(), begin, begin + static_cast<std::ptrdiff_t>(hit->second.count));
    return;
  }
  const size_t before = ids.size();
  make_symbols(part);
  merge_symbols();
  for (const Symbol& symbol : symbols_) {
    if (symbol.alive) ids.push_back(symbol.id);
  }
  if (part.size() <= kLongestCachedWord && cache_.size() < kMostCachedWords) {
    cache_.emplace(part, CachedWord{cached_ids_.size(), ids.size() - before});
    cached_ids_.insert(cached_ids_.end(), ids.begin() + static_cast<std::ptrdiff_t>(before),
                       ids.end());
  }
}

}  // namespace sqz
