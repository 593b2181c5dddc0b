// Token ids as a NumPy file of version 1, for tools that read such.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "formats/base/file.h"

namespace sqz::testing {

inline Status write_npy_tokens(Env& env, const std::string& path, std::span<const int32_t> tokens,
                               bool replace) {
  const std::string magic = "\x93NUMPY";
  std::string header =
      concat("{'descr': '<i4', 'fortran_order': False, 'shape': (", tokens.size(), ",), }");
  // numpy aligns the data to 64 bytes and ends the header with a newline.
  while ((magic.size() + 4 + header.size() + 1) % 64 != 0) header += ' ';
  header += '\n';
  std::string prefix = magic;
  prefix += '\1';
  prefix += '\0';
  prefix += static_cast<char>(header.size() & 0xff);
  prefix += static_cast<char>(header.size() >> 8);
  prefix += header;
  SQZ_ASSIGN_OR_RETURN(AtomicFile output, AtomicFile::create(env, path, replace));
  SQZ_RETURN_IF_ERROR(output.file().write(0, std::as_bytes(std::span(prefix))));
  SQZ_RETURN_IF_ERROR(output.file().write(prefix.size(), std::as_bytes(tokens)));
  return output.commit();
}

}  // namespace sqz::testing
