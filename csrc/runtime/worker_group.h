#pragma once
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>

namespace timelyfreeze {

// Long-lived workers, one a rank, that all run the same job and report back. The threads belong to the caller (Python
// hosts them, so that tracebacks and profilers know their names); each lends itself by calling `work`.
class WorkerGroup {
 public:
  using Job = std::function<void(int32_t rank)>;

  explicit WorkerGroup(int32_t num_ranks) : num_ranks_(num_ranks) {}

  // Runs jobs until `close`. Called once by each rank's thread.
  void work(int32_t rank);

  // Hands `job` to ranks 0..num_active-1. The group must be idle; jobs must not throw. False where it is closed.
  bool start(Job job, int32_t num_active);

  // Waits for the job to end; returns whether it has ended within `timeout`.
  bool wait_idle_for(std::chrono::milliseconds timeout);

  // Lets the workers go once they are idle.
  void close();

 private:
  const int32_t num_ranks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable idle_;
  Job job_;
  uint64_t generation_ = 0;
  int32_t num_active_ = 0;
  int32_t num_running_ = 0;
  bool closed_ = false;
};

}  // namespace timelyfreeze
