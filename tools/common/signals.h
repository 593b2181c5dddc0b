// SIGINT, SIGTERM and SIGHUP. The first one raises a flag. Work that checks the flag returns
// kCancelled, destructors remove temporary files, and the process then ends by the same signal. The
// second one ends the process at once.
#pragma once

#include <string>

#include "formats/base/status.h"

namespace sqz {

// To be called once, at the start of main(). `tool` opens the message. A signal that the parent
// ignores (nohup) stays ignored.
void handle_signals(const std::string& tool);

// kCancelled after a signal, else ok.
Status check_stop();
// Ends the process by the signal that came, if one came.
void end_by_signal();

}  // namespace sqz
