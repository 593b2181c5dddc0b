#include "tools/common/qmodel_table.h"

namespace sqz {

JsonMembers recall_json(const std::vector<QmodelRecall>& recall) {
  JsonMembers out;
  for (const QmodelRecall& row : recall) out[concat(row.selectivity)] = row.recall;
  return out;
}

JsonMembers qmodel_json(const QmodelFile& q) {
  return {{"producer", q.producer},
          {"fingerprint", fingerprint(q.model)},
          {"tokenizer_hash", q.tokenizer_hash},
          {"layers", q.model.layers},
          {"buckets", q.buckets},
          {"hidden", q.hidden},
          {"recent", q.recent},
          {"dtype", dtype_name(q.dtype)},
          {"dense", q.dense},
          {"recall", recall_json(q.recall)},
          {"training", q.training}};
}

}  // namespace sqz
