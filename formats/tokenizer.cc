#include "formats/tokenizer.h"

#include <exception>
#include <filesystem>
#include <new>

namespace sqz {
namespace {

constexpr uint64_t kLargestFile = uint64_t{1} << 30;

Result<std::string> find_file(const std::string& path, Env& env) {
  if (std::string inside = concat(path, "/tokenizer.json"); env.exists(inside)) return inside;
  std::error_code error;
  if (!std::filesystem::is_directory(path, error) && !path.ends_with("tokenizer.model")) {
    return path;
  }
  if (path.ends_with("tokenizer.model") || env.exists(concat(path, "/tokenizer.model"))) {
    return Status(Code::kUnsupported,
                  concat(path,
                         ": found tokenizer.model alone, expected tokenizer.json; "
                         "transformers makes it: AutoTokenizer.from_pretrained(folder)"
                         ".save_pretrained(folder)"));
  }
  return Status(Code::kNotFound, concat(path, ": no tokenizer.json"));
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& path, Env& env) {
  try {
    SQZ_ASSIGN_OR_RETURN(const std::string file, find_file(path, env));
    SQZ_ASSIGN_OR_RETURN(const std::string bytes, read_text_file(env, file, kLargestFile));
    return parse(bytes, file);
  } catch (const std::bad_alloc&) {
    return Status(Code::kOutOfMemory, concat(path, ": out of memory while loading the tokenizer"));
  } catch (const std::exception& error) {
    return Status(Code::kInternal, concat(path, ": ", error.what()));
  }
}

}  // namespace sqz
