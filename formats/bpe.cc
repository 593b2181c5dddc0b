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

int32_t Bpe::id_of(std::string_view token) const {
  const auto it = vocab_.find(token);
  return it == vocab_.end() ? -1 : it->second;
}

int32_t Bpe::character_id(std::string_view character, uint32_t code) const {
  if (code < common_characters_.size()) return common_characters_[code];
  return id_of(character);
}

Status Bpe::parse_options(const JsonObject& model) {
  // Files older than the field have no type; they are BPE if they have merges.
  SQZ_ASSIGN_OR_RETURN(const std::string type, model.string_or("type", "BPE"));
  if (type != "BPE") return model.unsupported("type", concat("model ", in_quotes(type)));
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    SQZ_ASSIGN_OR_RETURN(const std::string affix, model.string_or(key, ""));
    if (!affix.empty()) return model.unsupported(key, in_quotes(affix));
  }
  if (model.has("dropout")) {
    const JsonValue& dropout = *model.value.find("dropout");
    if (!dropout.is_number()) return model.bad("dropout", found_text(dropout), "a number");
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
    const std::string field = concat("model.vocab[", in_quotes(token), ']');
    SQZ_ASSIGN_OR_RETURN(const int32_t id, json_token_id(value, model.file, field));
    const auto stored = vocab_.emplace(token, id).first;
    const auto [other, fresh] = seen.emplace(id, stored->first);
    if (!fresh) {
      return Refuse{model.file}(
          field, concat("id ", id),
          concat("an id of its own, but ", in_quotes(other->second), " has it too"));
    }
  }
  SQZ_ASSIGN_OR_RETURN(const std::string unk, model.string_or("unk_token", ""));
  if (!unk.empty()) {
    unk_ = id_of(unk);
    if (*unk_ < 0) return model.bad("unk_token", in_quotes(unk), "a token of the vocabulary");
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
    return model.bad(concat("merges[", i, ']'), in_quotes(token), "a token of the vocabulary");
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
        return model.bad(concat("merges[", i, ']'), in_quotes(text), "two tokens and one space");
      }
      SQZ_RETURN_IF_ERROR(add_merge(model, i, text.substr(0, space), text.substr(space + 1)));
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      SQZ_RETURN_IF_ERROR(add_merge(model, i, merge[0].string(), merge[1].string()));
    } else {
      return model.bad(concat("merges[", i, ']'), found_text(merge), "\"a b\" or [\"a\", \"b\"]");
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

void BpeEncoder::add_symbol(int32_t id) {
  const auto position = static_cast<int32_t>(symbols_.size());
  if (position > 0) symbols_.back().next = position;
  symbols_.push_back({id, position - 1, -1, true});
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
