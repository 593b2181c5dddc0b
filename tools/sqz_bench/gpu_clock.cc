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

GpuClock::GpuClock(const std::string& bus_id) : library_(::dlopen("libnvidia-ml.so.1", RTLD_NOW)) {
  if (library_ == nullptr) return;
  int (*init)() = nullptr;
  int (*by_bus_id)(const char*, void**) = nullptr;
  const bool found = find(library_, "nvmlInit_v2", init) &&
                     find(library_, "nvmlDeviceGetHandleByPciBusId_v2", by_bus_id) &&
                     find(library_, "nvmlDeviceGetClockInfo", read_clock_) &&
                     find(library_, "nvmlDeviceGetPowerUsage", read_power_);
  if (!found || init() != 0 || by_bus_id(bus_id.c_str(), &device_) != 0) return;
  thread_ = std::thread([this] { read_until_told(); });
}

GpuClock::~GpuClock() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  told_.notify_all();
  if (thread_.joinable()) thread_.join();
  if (library_ != nullptr) ::dlclose(library_);
}

void GpuClock::read_until_told() {
  std::unique_lock lock(mutex_);
  while (!told_.wait_for(lock, std::chrono::milliseconds(10), [this] { return stop_; })) {
    Reading reading;
    reading.what = watched_;
    if (reading.what < 0) continue;
    if (read_clock_(device_, kSmClock, &reading.mhz) != 0) continue;
    if (read_power_(device_, &reading.milliwatts) != 0) continue;
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
