// Where queries come from. An engine has them on its device; this program reads them.
//
//   standard input  [T, Hq, d] of one layer, row-major: "text" is numbers between spaces or line
//                   ends, "f32" the little-endian floats themselves. T follows from their number
//   capture file    /layers/{l}/queries [Hq, T, d] as `sqz-index capture` writes it (HDF5)
//
// Errors are exceptions with one sentence that names the source.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

namespace embed {

// [T, heads, dim]
std::vector<float> read_queries(std::istream& in, const std::string& format, int64_t heads,
                                int64_t dim);

// The same from a capture; its shape must be that of the index.
std::vector<float> read_capture(const std::string& path, int64_t layer, int64_t heads, int64_t dim);

}  // namespace embed
