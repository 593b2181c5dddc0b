// Byte pair encoding: the "model" of tokenizer.json, from a word to token ids.
//
// A Bpe is immutable. A BpeEncoder has the working memory and the cache of words of one call to
// encode, and belongs to one thread.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "formats/tokenizer_fields.h"

namespace sqz {

// The merge of two adjacent tokens. Lower ranks are done first.
struct Merge {
  uint32_t rank;
  int32_t id;  // of the joined token
};

class Bpe {
 public:
  // Reads the object "model". Vocabulary ids must be distinct and merges must name known tokens.
  static Result<Bpe> parse(const JsonObject& model);

  const TokenMap<int32_t>& vocab() const { return vocab_; }

 private:
  friend class BpeEncoder;

  // Open addressing over (left, right): it takes a third of the time of std::unordered_map.
  class MergeTable {
   public:
    void reserve(size_t count);                             // of pairs, before the first insert()
    void insert(int32_t left, int32_t right, Merge merge);  // replaces one of the same pair
    const Merge* find(int32_t left, int32_t right) const;

   private:
    struct Slot {
      uint64_t key;
      Merge merge;
    };
    size_t slot_of(uint64_t key) const;
    std::vector<Slot> slots_;
  };

  Status parse_options(const JsonObject& model);
  Status parse_vocab(const JsonObject& model);
  Status parse_merges(const JsonObject& model);
  Status add_merge(const JsonObject& model, size_t i, std::string_view left,
                   std::string_view right);
  void add_joint(std::string_view left, std::string_view right);
  int32_t id_of(std::string_view token) const;  // -1 if there is no such token
  void index_common_characters();
  void index_byte_tokens();
  int32_t character_id(std::string_view character, uint32_t code) const;

  TokenMap<int32_t> vocab_;
  MergeTable merges_;
  std::unordered_set<uint64_t> joints_;  // of each merge: last character before, first behind it
  std::array<int32_t, 512> common_characters_;  // ids of one-character tokens below U+0200; or -1
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
  struct CachedWord {
    size_t begin;  // in cached_ids_
    size_t count;
  };

  size_t find_cut(std::string_view word, size_t from) const;
  void encode_part(std::string_view part, std::vector<int32_t>& ids);
  void make_symbols(std::string_view word);
  void add_symbol(int32_t id);
  void push_candidate(int32_t left);
  void merge_symbols();

  const Bpe& bpe_;
  std::vector<Symbol> symbols_;
  std::vector<Candidate> heap_;
  std::unordered_map<std::string_view, CachedWord> cache_;
  std::vector<int32_t> cached_ids_;
};

}  // namespace sqz
