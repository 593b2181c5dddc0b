// A training that can go on where it stood: a .sqz file of kind `qmodel-checkpoint`, private to
// sqz-train-qmodel. Everything that is not here follows from the settings and the step.
#pragma once

#include <string>
#include <vector>

#include "formats/base/file.h"
#include "formats/base/json.h"
#include "training/qmodel_network.h"

namespace sqz::training {

struct TrainingState {
  at::Tensor centroids;  // [n, C, d], before RoPE
  Network network;
  FoldedNetwork best;       // of the best check so far
  double best_recall = -1;  // mean over the selectivities; -1: no check yet
  int64_t best_step = 0;
  int64_t last_better = 0;  // checks since
  double loss_sum = 0;      // over the steps since the last check
  int64_t loss_steps = 0;
  double loss = 0;  // of the last check
};

// `settings`: everything that the result depends on.
Status write_checkpoint(Env& env, const std::string& path, const JsonMembers& settings,
                        const TrainingState& state);

// kMismatch, naming the first field that differs, if the file was written with other settings;
// kCorrupt if it is damaged. `shape` follows from the settings.
Result<TrainingState> read_checkpoint(Env& env, const std::string& path,
                                      const JsonMembers& settings, const NetworkShape& shape,
                                      at::Device device);

}  // namespace sqz::training
