#include "tools/common/openmp_wait.h"

#include <unistd.h>

#include <cstdlib>

namespace sqz {

void let_openmp_sleep(char** argv) {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  if (::setenv("OMP_WAIT_POLICY", "passive", 1) != 0) return;
  ::execv("/proc/self/exe", argv);
}

}  // namespace sqz
