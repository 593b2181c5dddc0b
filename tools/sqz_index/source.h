// Where the token ids of a fixed context come from: texts through the model's tokenizer, or a file
// of ids.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "formats/chat_format.h"
#include "formats/checkpoint.h"
#include "formats/tokenizer.h"
#include "tools/common/model_options.h"
#include "tools/common/output_file.h"
#include "tools/common/texts.h"
#include "tools/common/tool.h"

namespace sqz {

struct SourceOptions {
  std::string model;               // checkpoint directory
  std::vector<std::string> texts;  // files, folders, "-"
  std::string tokens;              // a file of ids
  int64_t max_tokens = 0;          // 0: all
  std::string chat;                // F.json: the texts around the turns that texts stand in
  std::string run_dtype;           // "f32", "bf16"; empty: f32 on the CPU, bf16 on a GPU
};

void add_source_options(CLI::App& app, SourceOptions& options);
// The files that the options name, and the texts.
std::vector<std::string> named_files(const SourceOptions& options);

struct FixedTokens {
  std::vector<int32_t> ids;
  std::string tokenizer_hash;  // empty if ids were given
  std::string source;          // what they are from, for messages
};

class Source {
 public:
  // Opens the checkpoint of `options` (not its weights), and with `tokenizer` its tokenizer.
  static Result<Source> open(const SourceOptions& options, bool tokenizer);

  const ModelConfig& model() const { return model_; }
  // The chat template's turns as IndexMetadata::chat; null if texts are taken as they are.
  JsonText chat() const { return chat_ ? to_json(*chat_) : JsonText(); }
  const Tokenizer* tokenizer() const { return tokenizer_.get(); }
  // The ids of texts, or of a file of ids: one of the two is given. Checked against the model.
  // `front`: tokens of other contexts in front; texts then get no special tokens.
  Result<FixedTokens> read(const std::vector<std::string>& texts, const std::string& tokens,
                           int64_t front) const;

 private:
  SourceOptions options_;
  ModelConfig model_;
  std::shared_ptr<const Tokenizer> tokenizer_;
  std::optional<ChatFormat> chat_;
};

// kInvalidArgument: neither texts nor ids were named.
Status no_context();

}  // namespace sqz
