// sqz-train-qmodel: which buckets of keys a model's queries need, learned once a model.
#include "tools/sqz_train_qmodel/train_qmodel.h"

int main(int argc, char** argv) {
  sqz::Tool tool(
      "sqz-train-qmodel",
      "Trains a query classifier for a model: buckets of keys, and networks that say which buckets "
      "a query needs.",
      R"(Method
  Runs the model over windows of the texts. Keys before RoPE are clustered into buckets, a
  set for each KV head; a network for each KV head learns, from queries before RoPE, which
  share of the attention each bucket holds (SAAP). Recall is the share of the attention mass
  beyond the last --recent tokens that is found where a given share of the keys is read.
  The paper's settings are --steps 40000 --batch 1000 --near 0 --lr 1e-5 --decay none.

Refused: fewer than 32 tokens to train on for each bucket, or than two windows; a loss that is
not a number.

Result: path, bytes, steps, loss, windows, tokens, measured_windows, recall{} by
selectivity, the file's metadata, and scores[] with method (classifier; kmeans, which reads
buckets by the products of query and centroid), queries (all; far: the best key is beyond
--recent), recall{}, stderr{} over windows. Events `check`: step, loss, recall{}, far_recall{}.

Examples:
  sqz-train-qmodel --model MODEL books/ -o q.sqz --device cuda
  sqz-train-qmodel --model MODEL books/ -o q.sqz --buckets 256 --test other.txt --json
)");
  sqz::TrainQmodelArguments arguments;
  CLI::App* app = tool.only_command(
      [&](const sqz::ToolContext& context) { return sqz::run_train_qmodel(arguments, context); });
  sqz::add_train_qmodel_options(*app, arguments);
  return tool.run(argc, argv, true);
}
