#include "formats/bpe.h"

#include <algorithm>

#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr size_t kLongestCachedWord = 256;
constexpr size_t kMostCachedWords = size_t{1} << 20;

uint64_t pair_key(int32_t left, int32_t right) {
  return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
}

}  // namespace

int32_t Bpe::id_of(std::string_view token) const {
  const auto it = vocab_.find(token);
  return it == vocab_.end() ? -1 : it->second;
}

const Bpe::Merge* Bpe::merge_of(int32_t left, int32_t right) const {
  const auto it = merges_.find(pair_key(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

void Bpe::read_options(JsonFields& model) {
  // Files older than the field have no type; they are BPE if they have merges.
  if (model.text("type", "BPE") != "BPE") model.complain("type", "BPE", Code::kUnsupported);
  for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    if (!model.text(key, "").empty()) model.complain(key, "no text", Code::kUnsupported);
  }
  if (model.number("dropout", 0, 1, 0.0) != 0) model.complain("dropout", "0", Code::kUnsupported);
  fuse_unk_ = model.boolean("fuse_unk", false);
  byte_fallback_ = model.boolean("byte_fallback", false);
  ignore_merges_ = model.boolean("ignore_merges", false);
}

void Bpe::read_vocab(JsonFields& model) {
  const JsonValue* vocab = model.find("vocab");
  if (vocab == nullptr || !vocab->is_object() || vocab->size() == 0) {
    return model.complain("vocab", "an object of at least one token");
  }
  vocab_.reserve(vocab->size());
  std::unordered_map<int32_t, std::string_view> seen;
  for (const JsonValue& value : vocab->items()) {
    const auto complain = [&](const std::string& expected) {
      model.complain_of(concat("vocab[", in_quotes(value.key()), ']'), found_text(value), expected);
    };
    const auto id = value.integer(0, INT32_MAX);
    if (!id) return complain("a token id, an integer from 0 to 2147483647");
    const auto stored = vocab_.emplace(value.key(), *id).first;
    const auto [other, fresh] = seen.emplace(*id, stored->first);
    if (!fresh) {
      return complain(concat("an id of its own, but ", in_quotes(other->second), " has it too"));
    }
  }
  const std::string unk = model.text("unk_token", "");
  if (unk.empty()) return;
  unk_ = id_of(unk);
  if (*unk_ < 0) model.complain("unk_token", "a token of the vocabulary");
}

void Bpe::read_merges(JsonFields& model) {
  const JsonValue* merges = model.array("merges");
  if (merges == nullptr) return;
  merges_.reserve(merges->size());
  for (size_t i = 0; i < merges->size(); ++i) {
    const JsonValue& merge = (*merges)[i];
    const auto complain = [&](const std::string& found, const char* expected) {
      model.complain_of(concat("merges[", i, ']'), found, expected);
    };
    std::string_view left, right;
    const std::string_view text = merge.string();
    if (const size_t space = text.find(' '); space != std::string_view::npos) {
      left = text.substr(0, space);
      right = text.substr(space + 1);
    } else if (merge.is_array() && merge.size() == 2) {
      left = merge[0].string();
      right = merge[1].string();
    }
    if (left.empty() || right.empty()) {
      return complain(found_text(merge), "\"a b\" or [\"a\", \"b\"]");
    }
    const std::string joined = concat(left, right);
    const int32_t a = id_of(left), b = id_of(right), both = id_of(joined);
    if (a < 0 || b < 0 || both < 0) {
      return complain(in_quotes(a < 0   ? left
                                : b < 0 ? right
                                        : joined),
                      "a token of the vocabulary");
    }
    merges_[pair_key(a, b)] = {static_cast<uint32_t>(i), both};
  }
}

Result<Bpe> Bpe::parse(JsonFields model) {
  Bpe bpe;
  bpe.read_options(model);
  bpe.read_vocab(model);
  bpe.read_merges(model);
  SQZ_RETURN_IF_ERROR(model.status());
  constexpr char kDigits[] = "0123456789ABCDEF";
  for (size_t byte = 0; byte < bpe.byte_tokens_.size(); ++byte) {
    bpe.byte_tokens_[byte] = bpe.id_of(concat("<0x", kDigits[byte >> 4], kDigits[byte & 15], '>'));
  }
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
    const std::string_view character = word.substr(offset, utf8_length(word[offset]));
    offset += character.size();
    if (const int32_t id = bpe_.id_of(character); id >= 0) {
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
  const auto* merge = bpe_.merge_of(symbol.id, symbols_[static_cast<size_t>(symbol.next)].id);
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
    const auto* merge = bpe_.merge_of(left.id, right.id);
    if (merge == nullptr || merge->id != top.id) continue;
    left.id = top.id;
    left.next = right.next;
    right.alive = false;
    if (left.next >= 0) symbols_[static_cast<size_t>(left.next)].previous = top.position;
    if (left.previous >= 0) push_candidate(left.previous);
    push_candidate(top.position);
  }
}

void BpeEncoder::encode(std::string_view word, std::vector<int32_t>& ids) {
  if (const int32_t whole = bpe_.ignore_merges_ ? bpe_.id_of(word) : -1; whole >= 0) {
    return ids.push_back(whole);
  }
  if (const auto hit = cache_.find(word); hit != cache_.end()) {
    ids.insert(ids.end(), hit->second.begin(), hit->second.end());
    return;
  }
  const auto before = std::ssize(ids);
  make_symbols(word);
  merge_symbols();
  for (const Symbol& symbol : symbols_) {
    if (symbol.alive) ids.push_back(symbol.id);
  }
  if (word.size() > kLongestCachedWord || cache_.size() >= kMostCachedWords) return;
  cache_.emplace(word, std::vector<int32_t>(ids.begin() + before, ids.end()));
}

}  // namespace sqz
