#pragma once
#include <atomic>
#include <cstdint>
#include <vector>

#include "core/cancel.h"
#include "core/event_log.h"
#include "core/program.h"

namespace timelyfreeze {

// Does the work of an action. Called from the worker of the action's rank, or, inline, from one worker for all.
class ActionRunner {
 public:
  virtual ~ActionRunner() = default;
  virtual void run(int32_t rank, const Instruction& instruction) = 0;
};

// One run of a program. Two ways to drive it give the same order on every rank, so the same results:
//  - `run_rank`, once from each rank's worker: ranks run side by side and hand over by atomics that a waiting thread
//  sleeps on;
//  - `run_inline`, from one thread: it walks all the ranks, going to the next where one would have to wait.
// The second is faster where actions are shorter than waking a sleeping thread and passing the interpreter lock on
// (tens of microseconds), and it is the one to use under a debugger.
class Execution {
 public:
  Execution(const Program& program, ActionRunner& runner, CancelToken& cancel, EventLog& log);

  // Both return early, never throw, where the step is cancelled; an action that throws cancels it.
  void run_rank(int32_t rank);
  void run_inline();

  // An action that another process runs has ended, and what it sent is here.
  void complete(ActionId id);

  // Wakes every rank that waits, so that it sees a cancellation made from outside.
  void wake_all();

 private:
  // Counts what happened that a rank may be waiting for. A cache line each: they are rung from other threads.
  struct alignas(64) Doorbell {
    std::atomic<uint32_t> rings{0};

    void ring() {
      rings.fetch_add(1, std::memory_order_release);
      rings.notify_one();
    }
  };

  [[nodiscard]] bool ready(const Instruction& instruction) const;
  bool wait_until_ready(int32_t rank, const Instruction& instruction);
  bool perform(int32_t rank, const Instruction& instruction);

  const Program& program_;
  ActionRunner& runner_;
  CancelToken& cancel_;
  EventLog& log_;
  std::vector<std::atomic<bool>> done_;
  std::vector<Doorbell> doorbells_;
};

}  // namespace timelyfreeze
