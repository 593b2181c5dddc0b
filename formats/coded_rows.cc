#include "formats/coded_rows.h"

namespace sqz {
namespace {

constexpr int64_t kScaleBytes = 2;

}  // namespace

const char* rows_name(RowKind rows) {
  return rows == RowKind::kQ8 ? "q8" : "16";
}

RowKind rows_of(std::string_view name) {
  return name == rows_name(RowKind::kQ8) ? RowKind::kQ8 : RowKind::k16;
}

CodedRows CodedRows::from_head(int64_t head, int64_t slots, int64_t dim) const {
  if (bits == 0) return {};
  return {bits, codes + head * slots * dim,
          static_cast<const std::byte*>(scales) + head * slots * kScaleBytes};
}

}  // namespace sqz
