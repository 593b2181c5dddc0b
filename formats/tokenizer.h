// Text to token ids and back, with the ids that Hugging Face `tokenizers` gives.
//
// The file is tokenizer.json with byte pair encoding: byte-level, as in Llama 3, Qwen 2/3 and
// GPT-2, or with byte fallback, as transformers writes it for a SentencePiece model. A tokenizer is
// immutable after loading, and several threads may use it.
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
  // Loads DIR/tokenizer.json; `path` may also name the file itself. A normalizer, model,
  // pre-tokenizer, post-processor or decoder that this class does not know is kUnsupported, and the
  // message names it. Truncation and padding are ignored.
  static Result<std::unique_ptr<Tokenizer>> load(const std::string& path, Env& env = Env::posix());
  // `json` is the content of a tokenizer.json, which `label` names in messages.
  static Result<std::unique_ptr<Tokenizer>> parse(std::string_view json, const std::string& label);
  virtual ~Tokenizer() = default;

  // Appends the ids of `text` to `ids`. Special tokens written out in the text are recognised.
  // With `add_special`, the tokens of the file's post-processor (usually BOS) are added.
  // Text that is not valid UTF-8 is kInvalidArgument, and the message names the byte; so is text of
  // more than 1 GiB. After an error `ids` is as it was.
  virtual Status encode(std::string_view text, bool add_special,
                        std::vector<int32_t>& ids) const = 0;

  // Appends the ids of the parts, which form one text: a token may begin in one part and end in the
  // next. Adds no special tokens.
  virtual Status encode_parts(std::span<const TextPart> parts, std::vector<int32_t>& ids) const = 0;

  // The text of `ids`; special tokens are left out unless `keep_special`. Bytes that do not form
  // valid UTF-8 are replaced by U+FFFD, as `tokenizers` does. An id outside the vocabulary is
  // kInvalidArgument.
  virtual Result<std::string> decode(std::span<const int32_t> ids,
                                     bool keep_special = false) const = 0;

  virtual int64_t vocab_size() const = 0;  // highest id + 1
  virtual std::optional<int32_t> token_to_id(std::string_view token) const = 0;
  // The first token of the post-processor's template, which `add_special` puts first; empty if the
  // tokenizer adds none (Qwen 2, GPT-2).
  virtual std::optional<int32_t> bos_token() const = 0;
  // XXH3-64 hex of the file's bytes.
  virtual const std::string& hash() const = 0;
};

}  // namespace sqz
