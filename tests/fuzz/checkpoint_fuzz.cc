// Any bytes as a checkpoint folder, config.json, the index of its shards and a shard, with a zero
// byte between: opened and every tensor touched, or refused; and the first as a layer profile.
#include <algorithm>

#include "formats/checkpoint.h"
#include "formats/layers_file.h"
#include "tests/fuzz/memory_env.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  auto rest = std::as_bytes(std::span(data, size));
  const auto take = [&] {
    const auto end = std::find(rest.begin(), rest.end(), std::byte{});
    const auto part = std::span(rest.begin(), end);
    rest = rest.subspan(std::min(part.size() + 1, rest.size()));
    return part;
  };
  sqz::MemoryEnv::Files files = {{"/config.json", take()}};
  files.emplace_back("/generation_config.json", files[0].second);
  const auto index = take();
  if (index.empty()) files.emplace_back("/model.safetensors", rest);
  files.emplace_back("/model.safetensors.index.json", index);
  files.emplace_back("of-1", rest);  // every shard
  sqz::MemoryEnv env(files);
  (void)sqz::read_layers_file("fuzz/config.json", env).ok();
  const auto checkpoint = sqz::Checkpoint::open("fuzz", env);
  if (!checkpoint.ok()) return 0;
  volatile unsigned sum = 0;
  for (const auto& required : sqz::required_tensors((*checkpoint)->config())) {
    const auto tensor = (*checkpoint)->tensor(required.name);
    for (const std::byte b : tensor->data) sum = sum + std::to_integer<unsigned>(b);
  }
  return 0;
}
