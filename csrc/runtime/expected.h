#pragma once
#include <condition_variable>
#include <deque>
#include <mutex>
#include <optional>
#include <vector>

#include "core/program.h"

namespace timelyfreeze {

// The actions whose packets are to come from a peer, in the order in which it sends them. More may be added meanwhile,
// until `end`.
class Expected {
 public:
  Expected() = default;
  // All of them.
  explicit Expected(const std::vector<ActionId>& ids) : ids_(ids.begin(), ids.end()), ended_(true) {}

  void add(const std::vector<ActionId>& ids) {
    {
      const std::lock_guard lock(mutex_);
      ids_.insert(ids_.end(), ids.begin(), ids.end());
    }
    changed_.notify_all();
  }

  void end() {
    {
      const std::lock_guard lock(mutex_);
      ended_ = true;
    }
    changed_.notify_all();
  }

  // Waits until there is one; false: there are no more.
  bool wait() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return ended_ || !ids_.empty(); });
    return !ids_.empty();
  }

  // The one that comes after `place` others, if it is known.
  std::optional<ActionId> at(size_t place) {
    const std::lock_guard lock(mutex_);
    return place < ids_.size() ? std::optional(ids_[place]) : std::nullopt;
  }

  ActionId take() {
    const std::lock_guard lock(mutex_);
    const ActionId first = ids_.front();
    ids_.pop_front();
    return first;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<ActionId> ids_;
  bool ended_ = false;
};

}  // namespace timelyfreeze
