#include "formats/tokenizer_regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <cstdint>
#include <new>

#include "formats/utf8.h"

namespace sqz {
namespace {

constexpr size_t kJitStackStart = 32 * 1024;
constexpr size_t kJitStackLimit = 16 * 1024 * 1024;
constexpr uint64_t kLeastLimit = 100'000;        // steps of one match
constexpr uint32_t kHeapLimitKib = 1024 * 1024;  // of the interpreter, when the JIT's stack is full

std::string pcre2_message(int error) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(error, text, sizeof(text));
  return reinterpret_cast<const char*>(text);
}

}  // namespace

Result<Regex> Regex::compile(std::string_view pattern, std::string_view label) {
  SQZ_ASSIGN_OR_RETURN(const std::string translated, translate_pattern(pattern, label));
  const std::unique_ptr<pcre2_compile_context, void (*)(pcre2_compile_context*)> context(
      pcre2_compile_context_create(nullptr), pcre2_compile_context_free);
  if (context == nullptr) return Status(Code::kOutOfMemory, concat(label, ": out of memory"));
  pcre2_set_newline(context.get(), PCRE2_NEWLINE_LF);
  int error = 0;
  PCRE2_SIZE offset = 0;
  pcre2_code* code =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &error,
                    &offset, context.get());
  if (code == nullptr) {
    return Status(Code::kCorrupt,
                  concat(label, ": not a valid regular expression: ", pcre2_message(error),
                         " at offset ", offset, " of \"", translated, "\""));
  }
  Regex regex;
  regex.code_ = std::shared_ptr<pcre2_code>(code, pcre2_code_free);
  // Where the machine has no JIT the interpreter gives the same matches, slower.
  pcre2_jit_compile(code, PCRE2_JIT_COMPLETE);
  return regex;
}

RegexMatcher::RegexMatcher(const Regex& regex)
    : code_(regex.code_),
      data_(pcre2_match_data_create_from_pattern(code_.get(), nullptr), pcre2_match_data_free),
      context_(pcre2_match_context_create(nullptr), pcre2_match_context_free),
      stack_(pcre2_jit_stack_create(kJitStackStart, kJitStackLimit, nullptr),
             pcre2_jit_stack_free) {
  if (data_ == nullptr || context_ == nullptr) throw std::bad_alloc();
  pcre2_set_heap_limit(context_.get(), kHeapLimitKib);
  if (stack_ != nullptr) pcre2_jit_stack_assign(context_.get(), nullptr, stack_.get());
}

void RegexMatcher::reset(std::string_view text) {
  text_ = text;
  // Backtracking over a whole text once, or a hundred times, is honest work.
  const auto limit =
      static_cast<uint32_t>(std::min<uint64_t>(kLeastLimit + 100 * text.size(), UINT32_MAX));
  pcre2_set_match_limit(context_.get(), limit);
  pcre2_set_depth_limit(context_.get(), limit);
  offset_ = 0;
  last_end_.reset();
}

int RegexMatcher::match_at(size_t offset) {
  const auto match = [&](uint32_t options) {
    return pcre2_match(code_.get(), reinterpret_cast<PCRE2_SPTR>(text_.data()), text_.size(),
                       offset, PCRE2_NO_UTF_CHECK | options, data_.get(), context_.get());
  };
  const int result = match(0);
  return result == PCRE2_ERROR_JIT_STACKLIMIT ? match(PCRE2_NO_JIT) : result;
}

Result<std::optional<Span>> RegexMatcher::next() {
  while (offset_ <= text_.size()) {
    const int result = match_at(offset_);
    if (result == PCRE2_ERROR_NOMATCH) break;
    if (result < 0) {
      return Status(Code::kUnsupported, concat("matching the split pattern from byte ", offset_,
                                               " failed: ", pcre2_message(result)));
    }
    const PCRE2_SIZE* ends = pcre2_get_ovector_pointer(data_.get());
    const Span span{ends[0], ends[1]};
    if (span.begin == span.end) {
      offset_ = span.end < text_.size() ? span.end + utf8_length(text_[span.end]) : span.end + 1;
      if (last_end_ == span.end) continue;
    } else {
      offset_ = span.end;
    }
    last_end_ = span.end;
    return std::optional<Span>(span);
  }
  offset_ = text_.size() + 1;
  return std::optional<Span>();
}

}  // namespace sqz
