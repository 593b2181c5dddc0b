// The stored tokenizers and texts of tests/golden/tokenizer (scripts/make_tokenizer_goldens.py).
#pragma once

#include <gtest/gtest.h>

#include <span>
#include <string>
#include <vector>

#include "formats/base/hash.h"
#include "formats/tokenizer.h"
#include "tests/common/json.h"
#include "tests/common/must.h"

namespace sqz::testing {

inline std::string golden_path(const std::string& name) {
  return concat(SQZ_SOURCE_DIR, "/tests/golden/tokenizer/", name);
}

inline std::string tokenizer_path(const std::string& name) {
  if (name == "nano") return concat(SQZ_SOURCE_DIR, "/examples/models/nano/tokenizer.json");
  return golden_path(name + ".json");
}

inline Json read_golden(const std::string& name) {
  const auto text = must(read_text_file(Env::posix(), golden_path(name)));
  return Json::parse(text);
}

inline std::unique_ptr<Tokenizer> load_golden(const std::string& name) {
  return must(Tokenizer::load(tokenizer_path(name)));
}

inline std::vector<std::string> golden_texts() {
  std::vector<std::string> texts;
  for (const Json& entry : read_golden("texts.json")) {
    if (entry.is_string()) {
      texts.push_back(entry);
      continue;
    }
    std::string& text = texts.emplace_back();
    for (int i = 0; i < entry["count"].get<int>(); ++i) text += entry["repeat"].get<std::string>();
  }
  return texts;
}

template <class T>
std::string hash_of(const T& values) {
  return hex(xxh3_64(std::as_bytes(std::span(values.data(), values.size()))));
}

}  // namespace sqz::testing
