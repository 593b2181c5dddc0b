// Byte pair encoding: the "model" of tokenizer.json, from a word to token ids.
//
// A Bpe is immutable. A BpeEncoder has the working memory and the cache of words of one call to
// encode, and belongs to one thread.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "formats/json_fields.h"

namespace sqz {

struct StringHash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
};
// Token ids by text; can be asked with a string_view.
using TokenMap = std::unordered_map<std::string, int32_t, StringHash, std::equal_to<>>;

class Bpe {
 public:
  // Reads the object "model". Vocabulary ids must be distinct and merges must name known tokens.
  static Result<Bpe> parse(JsonFields model);

  const TokenMap& vocab() const { return vocab_; }

 private:
  friend class BpeEncoder;

  // The merge of two adjacent tokens. Lower ranks are done first.
  struct Merge {
    uint32_t rank;
    int32_t id;  // of the joined token
  };

  void read_options(JsonFields& model);
  void read_vocab(JsonFields& model);
  void read_merges(JsonFields& model);
  int32_t id_of(std::string_view token) const;  // -1 if there is no such token
  const Merge* merge_of(int32_t left, int32_t right) const;

  TokenMap vocab_;
  std::unordered_map<uint64_t, Merge> merges_;  // by left << 32 | right
  std::array<int32_t, 256> byte_tokens_;        // ids of <0x00> to <0xFF>; -1 if missing
  std::optional<int32_t> unk_;
  bool fuse_unk_ = false;
  bool byte_fallback_ = false;
  bool ignore_merges_ = false;
};

class BpeEncoder {
 public:
  explicit BpeEncoder(const Bpe& bpe) : bpe_(bpe) {}

  // Appends the ids of `word`, valid UTF-8 that outlives the encoder. Time is n log n in its
  // length.
  void encode(std::string_view word, std::vector<int32_t>& ids);

 private:
  struct Symbol {
    int32_t id;
    int32_t previous;  // -1 at the ends
    int32_t next;
    bool alive;
  };
  struct Candidate {  // a merge of the symbol at `position` with the one behind it
    uint32_t rank;
    int32_t position;
    int32_t id;
    bool operator>(const Candidate& other) const {
      return rank != other.rank ? rank > other.rank : position > other.position;
    }
  };

  void make_symbols(std::string_view word);
  void add_symbol(int32_t id);
  void push_candidate(int32_t left);
  void merge_symbols();

  const Bpe& bpe_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
  std::unordered_map<std::string_view, std::vector<int32_t>> cache_;
};

}  // namespace sqz
