// The RoPE parameters of a Hugging Face config, in both spellings: "rope_theta" + "rope_scaling"
// ("type" or "rope_type"), and the "rope_parameters" block that transformers 5 writes.
#pragma once

#include "formats/json_fields.h"
#include "formats/model_description.h"

namespace sqz {

// `max_positions` is max_position_embeddings. Types other than default, linear, llama3 and yarn,
// partial rotation and parameters that differ between layers are kUnsupported.
Result<RopeDescription> parse_rope(JsonFields& config, int64_t max_positions);

}  // namespace sqz
