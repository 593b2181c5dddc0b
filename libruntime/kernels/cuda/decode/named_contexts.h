// The rows of a call name their contexts in device memory. A row is a request with one of its
// contexts.
#pragma once

#include <cstdint>

namespace sqz::cuda {

struct ContextLayer;

// As sqz_context in sqz.h.
struct RequestContext {
  int32_t slot, skip;
  int64_t offset;
};

struct NamedContexts {
  const RequestContext* contexts = nullptr;  // of the rows, as they are given
  // By slot, the layers of its context; null: it is empty.
  const ContextLayer* const* slots = nullptr;
  int32_t most_slots = 0, layer = 0;
};

}  // namespace sqz::cuda
