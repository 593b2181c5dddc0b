#include "formats/tokenizer.h"

#include <exception>
#include <filesystem>
#include <new>

#include "formats/tokenizer_files.h"

namespace sqz {
namespace {

constexpr uint64_t kLargestFile = uint64_t{1} << 30;

Result<std::string> find_file(const std::string& path, Env& env) {
  for (const char* name : {"tokenizer.json", "tokenizer.model"}) {
    const std::string inside = concat(path, '/', name);
    if (env.exists(inside)) return inside;
  }
  std::error_code error;
  if (std::filesystem::is_directory(path, error)) {
    return Status(Code::kNotFound, concat(path, ": no tokenizer.json and no tokenizer.model"));
  }
  return path;
}

// tokenizer.json is an object; a SentencePiece model begins with a field tag, a line feed, and its
// length.
bool is_json(std::string_view bytes, const std::string& path) {
  if (path.ends_with(".json")) return true;
  if (path.ends_with(".model")) return false;
  const size_t first = bytes.find_first_not_of(" \t\r\n");
  return first != std::string_view::npos && bytes[first] == '{';
}

Result<std::unique_ptr<Tokenizer>> load_file(const std::string& path, Env& env) {
  SQZ_ASSIGN_OR_RETURN(const std::string bytes, read_text_file(env, path, kLargestFile));
  return is_json(bytes, path) ? load_json_tokenizer(bytes, path) : load_sentencepiece(bytes, path);
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& path, Env& env) {
  try {
    SQZ_ASSIGN_OR_RETURN(const std::string file, find_file(path, env));
    return load_file(file, env);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, concat(path, ": out of memory while loading the tokenizer"));
  } catch (const std::exception& error) {
    return Status(Code::kInternal, concat(path, ": ", error.what()));
  }
}

}  // namespace sqz
