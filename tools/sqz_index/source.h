// Where the token ids of a fixed context come from: texts through the model's tokenizer, or a NumPy
// file. Shared by `build` and `capture`.
#pragma once

#include <memory>
#include <span>
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
  std::string tokens;              // F.npy
  int64_t max_tokens = 0;          // 0: all
  bool chat = false;               // texts stand in a turn of the model's chat template
  std::string chat_format;         // or of this file's (.json)
  std::string run_dtype;           // "f32", "bf16"; empty: f32 on the CPU, bf16 on a GPU

  bool in_turns() const { return chat || !chat_format.empty(); }
};

void add_source_options(CLI::App& app, SourceOptions& options);
// The files that the options name, those of the model too; not the texts.
std::vector<std::string> files_of(const SourceOptions& options);
RunnerOptions runner_options(const SourceOptions& source, const CommonOptions& common);

struct FixedTokens {
  std::vector<int32_t> ids;
  std::string tokenizer_hash;  // empty if ids were given
};

class Source {
 public:
  // Checks the combination of options and opens the checkpoint (not its weights).
  static Result<Source> open(const SourceOptions& options);
  // The checkpoint of `options` and its tokenizer, and no texts or ids yet.
  static Result<Source> open_model(const SourceOptions& options, bool tokenizer);
  // The same checkpoint with other texts, or with ids.
  Result<Source> with(const std::vector<std::string>& texts, const std::string& tokens) const;

  const ModelConfig& model() const { return model_; }
  // The turn that texts stand in; none if they are taken as they are.
  const std::optional<ChatFormat>& chat() const { return chat_; }
  JsonText chat_json() const { return chat_ ? to_json(*chat_) : JsonText(); }
  // Puts texts into a turn, or into none. kMismatch if the tokenizer lacks its tokens.
  Status set_chat(std::optional<ChatFormat> chat);
  // Every file found under the arguments; empty if ids were given.
  const std::vector<Document>& documents() const { return documents_; }
  // Every file that is read: of the model, and for tokens.
  std::vector<std::string> files() const;
  // The ids of `documents`, or of the NumPy file, checked against the model.
  Result<FixedTokens> tokens(std::span<const Document> documents) const;

 private:
  SourceOptions options_;
  ModelConfig model_;
  std::shared_ptr<const Tokenizer> tokenizer_;  // of texts
  std::optional<ChatFormat> chat_;
  std::vector<Document> documents_;
};

}  // namespace sqz
