// The selector `window` (sliding window attention): the most recent keys alone, without the sink
// that StreamingLLM adds. Layers that are read whole have theirs.
#include "libruntime/select/static_selection.h"

namespace sqz {

Result<PreparedSelector> prepare_window(const SelectorInputs& inputs,
                                        const SelectionRequest& request) {
  return prepare_static(inputs, request,
                        {.name = "window",
                         .exact_skipped = inputs.metadata.sink,
                         .choose = [](const StaticHead& head, std::span<uint8_t> chosen) {
                           choose_recent(head, head.keys, chosen);
                         }});
}

}  // namespace sqz
