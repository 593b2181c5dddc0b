#include "tools/common/signals.h"

#include <signal.h>

#include "formats/base/temporaries.h"

namespace sqz {
namespace {

void on_signal(int signal) {
  remove_temporaries();
  ::raise(signal);  // the action is the default one by now
}

}  // namespace

void handle_signals() {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    struct sigaction action = {};
    sigaction(signal, nullptr, &action);
    if (action.sa_handler == SIG_IGN) continue;
    action = {};
    action.sa_handler = on_signal;
    action.sa_flags = SA_RESETHAND | SA_NODEFER;
    sigaction(signal, &action, nullptr);
  }
}

}  // namespace sqz
