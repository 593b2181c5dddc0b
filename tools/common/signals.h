// SIGINT, SIGTERM and SIGHUP: a tool stops within two seconds and leaves no temporary file.
//
// A thread of its own waits for the signals. The first one raises the flag that stop_requested()
// returns: work that looks at it unwinds, and destructors remove what was half-written. Work that
// cannot look (one long matrix product) is given half a second; then the thread removes the
// temporaries of every protected output itself and ends the process. A second signal ends the wait.
#pragma once

#include <functional>
#include <string>

#include "formats/base/status.h"

namespace sqz {

// To be called once, first thing in main(). `tool` names the tool in messages. A signal that is
// ignored when the tool starts stays ignored. `goodbye` writes to standard output what there is to
// say, a few hundred bytes, when work that cannot look is ended; not where nobody reads it.
void watch_signals(const std::string& tool, std::function<void()> goodbye);

bool stop_requested();
// kCancelled if stop_requested(), else ok.
Status check_stop();
// From now on a stop can be made good: `checkpoint` is the file to resume from. Empty: no longer.
void set_resumable(const std::string& checkpoint);
// While it lives, the first SIGINT is for the piece of work at hand, an answer: interrupted()
// becomes true and the tool goes on. A second one stops the tool.
class Interruptible {
 public:
  Interruptible();
  ~Interruptible();
  Interruptible(const Interruptible&) = delete;
  Interruptible& operator=(const Interruptible&) = delete;
};
bool interrupted();

// `words` is called once, when the tool is stopped: before a thread that cannot look is ended, or
// by say_last_words(). It must not wait for other threads.
void set_last_words(std::function<void()> words);
void say_last_words();

// What the process should exit with after a stop: 130 or 143, or 4 if it can be resumed.
int stop_exit_code();

// Temporaries of AtomicFile for `path` ("PATH.tmp.<pid>.<n>") are removed if the process is ended.
void protect_output(const std::string& path);

}  // namespace sqz
