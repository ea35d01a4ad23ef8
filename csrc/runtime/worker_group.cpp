#include "runtime/worker_group.h"

#include <algorithm>

namespace timelyfreeze {

void WorkerGroup::work(int32_t rank) {
  std::unique_lock lock(mutex_);
  for (uint64_t seen = 0;;) {
    changed_.wait(lock, [&] { return closed_ || (generation_ != seen && rank < num_active_); });
    if (generation_ == seen || rank >= num_active_) return;  // closed, and nothing was left to do
    seen = generation_;
    lock.unlock();
    job_(rank);
    lock.lock();
    if (--num_running_ == 0) {
      job_ = nullptr;
      num_active_ = 0;
      idle_.notify_all();
    }
  }
}

bool WorkerGroup::start(Job job, int32_t num_active) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_ || num_running_ != 0) return false;
    job_ = std::move(job);
    num_active_ = std::min(num_active, num_ranks_);
    num_running_ = num_active_;
    ++generation_;
  }
  changed_.notify_all();
  return true;
}

bool WorkerGroup::wait_idle_for(std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return idle_.wait_for(lock, timeout, [&] { return num_running_ == 0; });
}

void WorkerGroup::close() {
  {
    const std::lock_guard lock(mutex_);
    closed_ = true;
  }
  changed_.notify_all();
}

}  // namespace timelyfreeze
