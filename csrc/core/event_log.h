#pragma once
#include <chrono>
#include <cstddef>
#include <vector>

#include "core/program.h"

namespace timelyfreeze {

// When each action of a step began and ended, in seconds since the step began. Each entry is written by the worker
// that runs the action and read after the step, so no lock is needed.
class EventLog {
 public:
  using Clock = std::chrono::steady_clock;

  explicit EventLog(int32_t num_actions)
      : origin_(Clock::now()), start_s_(static_cast<size_t>(num_actions), 0.0), end_s_(start_s_) {}

  void begin(ActionId id) { start_s_[static_cast<size_t>(id)] = now_s(); }
  void end(ActionId id) { end_s_[static_cast<size_t>(id)] = now_s(); }
  void set(ActionId id, double start_s, double end_s) {
    start_s_[static_cast<size_t>(id)] = start_s;
    end_s_[static_cast<size_t>(id)] = end_s;
  }
  // On the steady clock.
  [[nodiscard]] double origin_s() const { return std::chrono::duration<double>(origin_.time_since_epoch()).count(); }
  [[nodiscard]] double now_s() const { return std::chrono::duration<double>(Clock::now() - origin_).count(); }
  [[nodiscard]] const std::vector<double>& start_s() const { return start_s_; }
  [[nodiscard]] const std::vector<double>& end_s() const { return end_s_; }

 private:
  Clock::time_point origin_;
  std::vector<double> start_s_;
  std::vector<double> end_s_;
};

}  // namespace timelyfreeze
