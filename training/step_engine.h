// Runs steps of generation: tokens of one or several requests through all layers, behind a fixed
// context. What a request has generated is kept in a slot; who asks for steps decides which request
// has which.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "training/transformer.h"

namespace sqz::training {

// What a step runs of one request.
struct StepPart {
  int64_t slot = 0;
  int64_t at = 0;  // own tokens before these; what the slot held from there on is forgotten
  std::vector<int32_t> tokens;  // empty: one, the slot's last choice, where the engine runs ahead
};

struct StepOptions {
  FixedContext* context = nullptr;  // null: tokens stand at position 0
  bool all_rows = false;            // results of every token; else of the last of each part
  bool logits = false;              // and not the choices alone
};

struct StepResult {
  std::vector<int32_t> choices;  // [rows] likeliest token, the lowest id of equals; -1: NaN or
                                 // infinity in the logits
  at::Tensor logits;             // [rows, vocab] float32 on the CPU, if asked for
};

class StepEngine {
 public:
  virtual ~StepEngine() = default;
  virtual int64_t slots() const = 0;
  // Room for so many own tokens in each slot. No step may be under way.
  virtual Status reserve(int64_t tokens) = 0;
  // Whether a step may be started before the one in front of it is finished, with tokens that only
  // the engine knows by then.
  virtual bool runs_ahead() const = 0;
  virtual Status start(std::span<const StepPart> parts, const StepOptions& options) = 0;
  // Of the oldest step under way.
  virtual Result<StepResult> finish() = 0;
};

// Layer by layer with LibTorch's operations, on any device.
std::unique_ptr<StepEngine> make_layer_engine(const Transformer& transformer, int64_t slots);

// With kernels of its own and captured CUDA graphs, over contexts that serve on the model's device.
// Null where that cannot be: on a CPU, in a build without CUDA, for such a context or model.
Result<std::unique_ptr<StepEngine>> make_graph_engine(const Transformer& transformer,
                                                      const FixedContext& context, int64_t slots);

}  // namespace sqz::training
