// Exit codes of every tool; `--help` and docs/cli.md list them.
#pragma once

#include "formats/base/status.h"

namespace sqz {

enum ExitCode : int {
  kExitOk = 0,
  kExitError = 1,          // the operating system refused, an output exists, or a bug
  kExitUsage = 2,          // options that cannot be used, together, with this input or machine
  kExitBadInput = 3,       // an input file is missing, broken, unsupported or of another model
  kExitResumable = 4,      // stopped, and the same command with --resume goes on
  kExitInterrupted = 130,  // SIGINT; SIGTERM and SIGHUP give 143. Nothing half-written is left
  kExitTerminated = 143,
};

int exit_code(const Status& status);

}  // namespace sqz
