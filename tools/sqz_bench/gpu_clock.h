// What the clock and the power of a GPU were while something ran: read every 10 ms, through the
// driver's management library (libnvidia-ml.so.1), which is loaded at run time.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
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
  ~GpuClock();
  GpuClock(const GpuClock&) = delete;
  GpuClock& operator=(const GpuClock&) = delete;

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
  using ReadCounter = int (*)(void* device, unsigned* value);
  using ReadClock = int (*)(void* device, int clock, unsigned* value);

  void read_until_told();

  void* library_ = nullptr;
  void* device_ = nullptr;
  ReadClock read_clock_ = nullptr;
  ReadCounter read_power_ = nullptr;
  std::atomic<int> watched_ = -1;
  mutable std::mutex mutex_;
  std::condition_variable told_;
  bool stop_ = false;
  std::vector<Reading> readings_;
  std::thread thread_;
};

}  // namespace sqz::bench
