// In place of tools/sqz_bench/torch_attention.cc where sqz is built without LibTorch.
#include "tools/sqz_bench/attention_fixture.h"
#include "tools/sqz_bench/machine.h"

namespace sqz::bench {

std::string torch_version() {
  return "";
}

std::vector<Contender> torch_contenders(const Options&, const Fixture&) {
  return {};
}

}  // namespace sqz::bench
