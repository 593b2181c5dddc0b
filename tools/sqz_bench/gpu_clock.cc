#include "tools/sqz_bench/gpu_clock.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>

namespace sqz::bench {
namespace {

constexpr int kSmClock = 1;  // NVML_CLOCK_SM

template <class Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

unsigned median(std::vector<unsigned> values) {
  const auto middle = values.begin() + std::ssize(values) / 2;
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

}  // namespace

GpuClock::GpuClock(const std::string& bus_id) {
  static void* const library = ::dlopen("libnvidia-ml.so.1", RTLD_NOW);
  if (library == nullptr) return;
  int (*init)() = nullptr;
  int (*by_bus_id)(const char*, void**) = nullptr;
  const bool found = find(library, "nvmlInit_v2", init) &&
                     find(library, "nvmlDeviceGetHandleByPciBusId_v2", by_bus_id) &&
                     find(library, "nvmlDeviceGetClockInfo", read_clock_) &&
                     find(library, "nvmlDeviceGetPowerUsage", read_power_);
  if (!found || init() != 0 || by_bus_id(bus_id.c_str(), &device_) != 0) return;
  thread_ = std::jthread([this](const std::stop_token& stop) { read_until(stop); });
}

void GpuClock::read_until(const std::stop_token& stop) {
  while (!stop.stop_requested()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    Reading reading;
    reading.what = watched_;
    if (reading.what < 0) continue;
    if (read_clock_(device_, kSmClock, &reading.mhz) != 0) continue;
    if (read_power_(device_, &reading.milliwatts) != 0) continue;
    const std::lock_guard lock(mutex_);
    if (reading.what == watched_) readings_.push_back(reading);
  }
}

JsonMembers GpuClock::summary(int what) const {
  std::vector<unsigned> mhz, milliwatts;
  {
    const std::lock_guard lock(mutex_);
    for (const Reading& reading : readings_) {
      if (reading.what != what) continue;
      mhz.push_back(reading.mhz);
      milliwatts.push_back(reading.milliwatts);
    }
  }
  if (mhz.empty()) return {};
  const auto [least, most] = std::minmax_element(mhz.begin(), mhz.end());
  return {{"sm_mhz", {{"min", *least}, {"median", median(mhz)}, {"max", *most}}},
          {"watts", median(milliwatts) / 1000},
          {"readings", mhz.size()}};
}

}  // namespace sqz::bench
