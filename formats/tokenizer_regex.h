// Regular expressions as tokenizer.json writes them: Oniguruma's Ruby dialect, run by PCRE2.
//
// White space and properties are rewritten, because the two engines know other characters by them.
// Constructs that are not known to mean the same in both are refused. A Regex is immutable, and
// several threads may use it; a RegexMatcher belongs to one.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "formats/base/status.h"

struct pcre2_real_code_8;
struct pcre2_real_match_context_8;
struct pcre2_real_match_data_8;
struct pcre2_real_jit_stack_8;

namespace sqz {

// `pattern` in PCRE2's dialect; kUnsupported names the construct that is not translated.
Result<std::string> translate_pattern(std::string_view pattern, std::string_view label);

// A pattern that matches `literal` and nothing else.
std::string escape_pattern(std::string_view literal);

class Regex {
 public:
  // `label` names the field in messages ("FILE: pre_tokenizer.pattern").
  static Result<Regex> compile(std::string_view pattern, std::string_view label);

 private:
  friend class RegexMatcher;
  std::shared_ptr<pcre2_real_code_8> code_;
};

struct Span {
  size_t begin = 0;
  size_t end = 0;
};

// Walks the matches of one Regex over texts; keeps the engine's working memory between them.
class RegexMatcher {
 public:
  explicit RegexMatcher(const Regex& regex);
  RegexMatcher(const RegexMatcher&) = delete;
  RegexMatcher& operator=(const RegexMatcher&) = delete;

  // Starts on `text`, valid UTF-8 that outlives the walk.
  void reset(std::string_view text);
  // The next match that does not overlap the one before; empty at the end. An empty match right
  // behind the previous match is skipped, as Oniguruma's iterator does.
  Result<std::optional<Span>> next();

 private:
  int match_at(size_t offset);

  std::shared_ptr<pcre2_real_code_8> code_;
  std::shared_ptr<pcre2_real_match_data_8> data_;  // its own, as the two below
  std::shared_ptr<pcre2_real_match_context_8> context_;
  std::shared_ptr<pcre2_real_jit_stack_8> stack_;  // null: without JIT
  std::string_view text_;
  size_t offset_ = 0;
  std::optional<size_t> last_end_;
};

}  // namespace sqz
