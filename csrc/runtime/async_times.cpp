#include "runtime/async_times.h"

#include <utility>

namespace timelyfreeze {

AsyncTimes::AsyncTimes(const std::vector<RankDevice>& devices, bool enabled)
    : devices_(devices), enabled_(enabled), origin_(std::chrono::steady_clock::now()) {
  if (!enabled_) return;
  for (const RankDevice& device : devices_) origins_.push_back(device.mark());
}

double AsyncTimes::now_s() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - origin_).count();
}

std::vector<AsyncTime> AsyncTimes::take() {
  std::vector<Entry> taken;
  {
    const std::lock_guard lock(mutex_);
    taken.swap(entries_);
  }
  constexpr double kMilli = 1e-3;
  std::vector<AsyncTime> times;
  for (Entry& entry : taken) {
    const auto& origin = origins_[static_cast<size_t>(entry.time.stage)];
    if (origin && entry.started && entry.ended) {
      entry.ended->synchronize();
      entry.time.start_s = origin->elapsedTime(*entry.started) * kMilli;
      entry.time.end_s = origin->elapsedTime(*entry.ended) * kMilli;
    }
    times.push_back(entry.time);
  }
  return times;
}

}  // namespace timelyfreeze
