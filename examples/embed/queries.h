// Where queries come from. An engine has them on its device; this program reads them. Both return
// [T, heads, dim] of one layer, and throw std::runtime_error with one sentence that names the
// source.
#pragma once

#include <cstdint>
#include <istream>
#include <string>
#include <vector>

// Numbers between spaces or line ends, row-major; T follows from their count.
std::vector<float> read_queries(std::istream& in, int64_t heads, int64_t dim);

// /layers/{l}/queries [heads, T, dim] of a capture file (HDF5), as `sqz-index capture` writes it.
std::vector<float> read_capture(const std::string& path, int64_t layer, int64_t heads, int64_t dim);
