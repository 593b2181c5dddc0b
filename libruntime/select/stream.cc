// The selector `stream` (StreamingLLM): the sink and the most recent keys, whatever is asked.
//
// Sink and tail are always read; of the keys between them, those with the highest token positions,
// as many as the budget leaves. In token order they are one run, in cluster order many short ones.
#include "libruntime/select/static_selection.h"

namespace sqz {

Result<PreparedSelector> prepare_stream(const SelectorInputs& inputs,
                                        const SelectionRequest& request) {
  return prepare_static(
      inputs, request,
      {.name = "stream", .choose = [](const StaticHead& head, std::span<uint8_t> chosen) {
         choose_recent(head, head.keys, chosen);
       }});
}

}  // namespace sqz
