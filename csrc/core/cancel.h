#pragma once
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>

#include "core/program.h"

namespace timelyfreeze {

// Where a step failed, and with what. `id` is empty where the caller itself stopped the step.
struct Failure {
  std::optional<ActionId> id;
  std::exception_ptr error;
};

// Stops a step: set once, by the first failure; everyone else reads it and drains.
class CancelToken {
 public:
  // Returns whether this call was the first.
  bool cancel(std::optional<ActionId> id, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (cancelled_.load(std::memory_order_relaxed)) return false;
    failure_ = {id, std::move(error)};
    cancelled_.store(true, std::memory_order_release);
    return true;
  }
  [[nodiscard]] bool cancelled() const { return cancelled_.load(std::memory_order_acquire); }

  // Call after the step has drained.
  [[nodiscard]] Failure failure() const {
    const std::lock_guard lock(mutex_);
    return failure_;
  }

 private:
  mutable std::mutex mutex_;
  std::atomic<bool> cancelled_{false};
  Failure failure_;
};

}  // namespace timelyfreeze
