// libindex/calibration_scorer.h on a CUDA device: a layer's KV heads at once, as many as fit the
// free device memory. Scores differ from the CPU's by rounding; the same bits from run to run.
#pragma once

#include <memory>

#include "libindex/calibration_scorer.h"
#include "libruntime/cuda/device.h"

namespace sqz::cuda {

// `input` and `memory`, which may be in use between calls of run(), must outlive it.
std::unique_ptr<CalibrationScorer> make_calibration_scorer(const CalibrationInput& input, int gpu,
                                                           DeviceMemory& memory);

}  // namespace sqz::cuda
