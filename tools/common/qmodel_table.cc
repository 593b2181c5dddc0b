#include "tools/common/qmodel_table.h"

namespace sqz {

JsonMembers recall_json(const std::vector<QmodelRecall>& recall) {
  JsonMembers out;
  for (const QmodelRecall& row : recall) out[concat(row.selectivity)] = row.recall;
  return out;
}

std::string recall_text(const std::vector<QmodelRecall>& recall) {
  std::string out;
  for (const QmodelRecall& row : recall) {
    out += printed("%s%.3f at %g %%", out.empty() ? "" : ", ", row.recall, 100 * row.selectivity);
  }
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

Rows qmodel_rows(const QmodelFile& q) {
  Rows rows = {{"model", concat(q.model.architecture, ", ", q.model.layers, " layers, ",
                                q.model.query_heads, " query heads, ", q.model.kv_heads,
                                " KV heads, head_dim ", q.model.head_dim)},
               {"fingerprint", fingerprint(q.model)},
               {"buckets", concat(q.buckets, " a KV head")},
               {"classifier", concat(q.model.head_dim, " -> ", q.hidden, " -> ", q.buckets, ", ",
                                     dtype_name(q.dtype))},
               {"dense layers", q.dense.empty() ? "none" : list_text(q.dense)},
               {"exact", concat("the last ", q.recent, " tokens, as trained")},
               {"recall", q.recall.empty() ? "not measured" : recall_text(q.recall)}};
  for (auto& row : member_rows("training", q.training)) rows.push_back(std::move(row));
  return rows;
}

}  // namespace sqz
