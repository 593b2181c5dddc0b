// SIGINT, SIGTERM and SIGHUP end a tool at once, as they do by default, but its temporary files are
// removed first.
#pragma once

namespace sqz {

// To be called once, at the start of main(). A signal that the parent ignores (nohup) stays
// ignored.
void handle_signals();

}  // namespace sqz
