// What the clock and the power of a GPU were while something ran: read every 10 ms, through the
// driver's management library (libnvidia-ml.so.1), which is loaded at run time.
#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "formats/base/json.h"

namespace sqz::bench {

class GpuClock {
 public:
  // `bus_id` as cudaDeviceGetPCIBusId() has it. Without the library nothing is read.
  explicit GpuClock(const std::string& bus_id);

  // What is read from here on counts for `what`, a small number; a negative one: for nothing.
  void watch(int what) { watched_ = what; }

  // {"sm_mhz": {"min", "median", "max"}, "watts": median, "readings": n} of one `what`; an empty
  // object if there are none.
  JsonMembers summary(int what) const;

 private:
  struct Reading {
    int what = 0;
    unsigned mhz = 0, milliwatts = 0;
  };

  void read_until(const std::stop_token& stop);

  void* device_ = nullptr;
  int (*read_clock_)(void* device, int clock, unsigned* value) = nullptr;
  int (*read_power_)(void* device, unsigned* value) = nullptr;
  std::atomic<int> watched_ = -1;
  mutable std::mutex mutex_;
  std::vector<Reading> readings_;
  std::jthread thread_;  // last: it ends before what it uses
};

}  // namespace sqz::bench
