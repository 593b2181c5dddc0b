// A text as token ids.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace sqz {

struct TokenText {
  std::string name;  // opens messages: "book.txt"
  std::vector<int32_t> tokens;
};

}  // namespace sqz
