#pragma once
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>
#include <vector>

#include "runtime/device.h"

namespace timelyfreeze {

// How long an action of a stream took: F, B or U (an update). Seconds since the stream's beginning.
struct AsyncTime {
  int32_t stage;
  char kind;
  int64_t microbatch;
  double start_s;
  double end_s;
};

// What the actions of a stream took, until somebody takes it; by events where the stage is on an accelerator, whose
// host thread runs ahead.
class AsyncTimes {
 public:
  AsyncTimes(const std::vector<RankDevice>& devices, bool enabled);

  // Runs `action`, and keeps how long it took unless it throws.
  template <typename Action>
  void time(int32_t stage, char kind, int64_t microbatch, Action&& action) {
    if (!enabled_) return action();
    Entry entry{{stage, kind, microbatch, now_s(), 0.0}, device(stage).mark(), std::nullopt};
    action();
    entry.time.end_s = now_s();
    entry.ended = device(stage).mark();
    const std::lock_guard lock(mutex_);
    entries_.push_back(std::move(entry));
  }
  // Waits for the actions' ends on their devices, which the host may be ahead of.
  std::vector<AsyncTime> take();

 private:
  struct Entry {
    AsyncTime time;
    std::optional<c10::Event> started;
    std::optional<c10::Event> ended;
  };

  [[nodiscard]] const RankDevice& device(int32_t stage) const { return devices_[static_cast<size_t>(stage)]; }
  [[nodiscard]] double now_s() const;

  const std::vector<RankDevice>& devices_;
  const bool enabled_;
  const std::chrono::steady_clock::time_point origin_;
  std::vector<std::optional<c10::Event>> origins_;  // a stage
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace timelyfreeze
