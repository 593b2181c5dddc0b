// Makes OpenMP's threads sleep while they wait for work.
#pragma once

namespace sqz {

// By default, idle OpenMP threads spin for milliseconds on cores that the threads of clustering and
// of the runtime need. OpenMP reads its environment when it is loaded, so this function starts the
// program again with OMP_WAIT_POLICY=passive. It returns if OMP_WAIT_POLICY or GOMP_SPINCOUNT is
// set, or if the start fails. It is for tools that work for minutes, because the libraries are
// loaded twice.
void let_openmp_sleep(char** argv);

}  // namespace sqz
