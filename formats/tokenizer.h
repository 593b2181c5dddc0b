// Text to token ids and back, with the ids that Hugging Face `tokenizers` or SentencePiece give.
//
// Two file formats: tokenizer.json (byte-level BPE, as Llama 3, Qwen 2/3 and GPT-2 use it, and the
// BPE with byte fallback that converted SentencePiece models use) and SentencePiece
// tokenizer.model. A tokenizer is immutable after loading and may be used from several threads.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "formats/base/file.h"
#include "formats/base/status.h"

namespace sqz {

// A piece of a text to encode.
struct TextPart {
  std::string_view text;
  bool special = true;  // whether special tokens that are written out in it are recognised
};

class Tokenizer {
 public:
  // Loads DIR/tokenizer.json, else DIR/tokenizer.model; `path` may also name the file itself. What
  // the file asks for that is not done here (another normalizer, model or pre-tokenizer) is
  // kUnsupported and named.
  static Result<std::unique_ptr<Tokenizer>> load(const std::string& path, Env& env = Env::posix());
  virtual ~Tokenizer() = default;

  // Appends the ids of `text` to `ids`. Special tokens written out in the text are recognised.
  // With `add_special`, what the file's post-processor adds (usually BOS) is added.
  // Text that is not valid UTF-8 is kInvalidArgument and says at which byte; so is text of more
  // than 1 GiB. After an error `ids` is as it was.
  //
  // SentencePiece models: as in Hugging Face's LlamaTokenizer, `add_special` puts the model's BOS
  // first. Control pieces written out in the text ("<s>") are plain text, as libsentencepiece has
  // it; user-defined pieces are recognised. A tokenizer.json's truncation and padding are ignored.
  virtual Status encode(std::string_view text, bool add_special,
                        std::vector<int32_t>& ids) const = 0;

  // Appends the ids of the parts one after the other, which are one text: a token may begin in one
  // part and end in the next. Adds no special tokens. kUnsupported but for a tokenizer.json.
  virtual Status encode_parts(std::span<const TextPart>, std::vector<int32_t>&) const {
    return {Code::kUnsupported,
            "this tokenizer recognises no special tokens in a text: a tokenizer.json is needed"};
  }

  // The text of `ids`; special tokens are left out unless asked for. Bytes that do not form valid
  // UTF-8 are replaced by U+FFFD, as `tokenizers` does. An id outside the vocabulary is
  // kInvalidArgument.
  virtual Result<std::string> decode(std::span<const int32_t> ids,
                                     bool keep_special = false) const = 0;

  virtual int64_t vocab_size() const = 0;  // highest id + 1
  virtual std::optional<int32_t> token_to_id(std::string_view token) const = 0;
  // What `add_special` puts first: the first token of the post-processor's template, or the model's
  // BOS; empty if the tokenizer adds none (Qwen 2, GPT-2).
  virtual std::optional<int32_t> bos_token() const = 0;
  // XXH3-64 hex of the file's bytes.
  virtual const std::string& hash() const = 0;
};

}  // namespace sqz
