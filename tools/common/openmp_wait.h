// How OpenMP's threads wait for work.
#pragma once

namespace sqz {

// Idle OpenMP threads spin for milliseconds unless they are told otherwise, on cores that threads
// of clustering and of the runtime need just then. OpenMP reads its environment when it is loaded,
// so the program starts itself once more, with OMP_WAIT_POLICY=passive. Returns where the user has
// chosen already (OMP_WAIT_POLICY or GOMP_SPINCOUNT is set), or where that fails. Of tools that
// work for minutes, before they begin: the libraries are loaded twice.
void let_openmp_sleep(char** argv);

}  // namespace sqz
