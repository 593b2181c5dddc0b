// Adds partial states, finishes them, and merges finished states.
#pragma once

#include <cstdint>

#include "formats/base/dtype.h"
#include "libruntime/attention/attend.h"
#include "libruntime/attention/lse_rows.h"

namespace sqz {

// Adds `part`, a state over other keys, to `into`. The result depends on the order of such calls,
// which the caller fixes.
void add_partial(const PartialRows& into, const PartialRows& part, int64_t rows, int64_t dim);

// out[c] = values[c] / sum as dtype, *lse = maximum + log(sum). Without keys out is 0 and *lse
// -infinity. False if the state is NaN or infinite.
bool finish_row(const PartialRows& state, int64_t row, int64_t dim, DType dtype, void* out,
                float* lse);

// Converts `count` numbers of F32, F16 or BF16 to float32. `out` may be null. False if a number is
// NaN or infinite.
bool to_finite_floats(DType dtype, const void* in, int64_t count, float* out);

// Merges finished state b into a, [rows, dim]; lse -infinity means "no keys". False if a lse is NaN
// or +infinity; a row is untouched then.
bool merge_rows(DType dtype, int64_t rows, int64_t dim, void* out_a, const LseRows& lse_a,
                const void* out_b, const ConstLseRows& lse_b);

}  // namespace sqz
