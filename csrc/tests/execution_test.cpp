#include "runtime/execution.h"

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "runtime/worker_group.h"
#include "tests/check.h"
#include "tests/schedules.h"

namespace timelyfreeze::testing {
namespace {

// Passes plain, unguarded numbers from action to action: a missing hand-over is a data race.
class Relay : public ActionRunner {
 public:
  explicit Relay(const Program& program) : program_(program), values_(static_cast<size_t>(program.num_actions()), 0) {}

  void run(int32_t rank, const Instruction& instruction) override {
    CHECK(program_.rank_of(instruction.id) == rank);
    if (instruction.id == fail_at) throw std::runtime_error("stub");
    int64_t value = 1;
    for (const ActionId before : instruction.waits_for) value += values_[static_cast<size_t>(before)];
    values_[static_cast<size_t>(instruction.id)] = value;
    ++num_run;
  }

  std::atomic<int> num_run{0};
  ActionId fail_at = -1;
  [[nodiscard]] const std::vector<int64_t>& values() const { return values_; }

 private:
  const Program& program_;
  std::vector<int64_t> values_;
};

class Ranks {
 public:
  explicit Ranks(int32_t num_ranks) : workers(num_ranks) {
    for (int32_t rank = 0; rank < num_ranks; ++rank) threads_.emplace_back([this, rank] { workers.work(rank); });
  }
  ~Ranks() {
    workers.close();
    for (auto& thread : threads_) thread.join();
  }
  void run(Execution& execution, int32_t num_ranks) {
    CHECK(workers.start([&](int32_t rank) { execution.run_rank(rank); }, num_ranks));
    while (!workers.wait_idle_for(std::chrono::milliseconds(50))) {
    }
  }
  WorkerGroup workers;

 private:
  std::vector<std::thread> threads_;
};

TEST(threaded_and_inline_runs_compute_the_same) {
  for (const int32_t num_stages : {1, 2, 4, 7}) {
    Ranks ranks(num_stages);
    for (const int32_t num_microbatches : {1, 3, 16}) {
      const Program program = make_program(num_stages, num_microbatches);
      std::vector<int64_t> expected;
      for (int round = 0; round < 20; ++round) {
        Relay relay(program);
        CancelToken cancel;
        EventLog log(program.num_actions());
        Execution execution(program, relay, cancel, log);
        if (round == 0) {
          execution.run_inline();
          expected = relay.values();
        } else {
          ranks.run(execution, num_stages);
          CHECK(relay.values() == expected);
        }
        CHECK(relay.num_run == program.num_actions() && !cancel.cancelled());
        for (ActionId id = 0; id < program.num_actions(); ++id) {
          CHECK(log.end_s()[static_cast<size_t>(id)] >= log.start_s()[static_cast<size_t>(id)]);
        }
      }
    }
  }
}

TEST(the_first_failure_stops_every_rank_and_the_workers_serve_on) {
  const int32_t num_stages = 4;
  Ranks ranks(num_stages);
  const Program program = make_program(num_stages, 8);
  for (ActionId fail_at = 0; fail_at < program.num_actions(); ++fail_at) {
    Relay relay(program);
    relay.fail_at = fail_at;
    CancelToken cancel;
    EventLog log(program.num_actions());
    Execution execution(program, relay, cancel, log);
    ranks.run(execution, num_stages);
    CHECK(cancel.cancelled() && cancel.failure().id == fail_at);
    CHECK(relay.num_run < program.num_actions());
  }
  Relay relay(program);
  CancelToken cancel;
  EventLog log(program.num_actions());
  Execution execution(program, relay, cancel, log);
  ranks.run(execution, num_stages);
  CHECK(relay.num_run == program.num_actions());
}

// Waits inside an action until the caller has cancelled.
class Hold : public ActionRunner {
 public:
  void run(int32_t, const Instruction&) override {
    held = true;
    held.notify_all();
    released.wait(false);
  }
  std::atomic<bool> held{false};
  std::atomic<bool> released{false};
};

TEST(a_cancellation_from_outside_drains) {
  const Program program = make_program(3, 4);
  Ranks ranks(3);
  Hold hold;
  CancelToken cancel;
  EventLog log(program.num_actions());
  Execution execution(program, hold, cancel, log);
  CHECK(ranks.workers.start([&](int32_t rank) { execution.run_rank(rank); }, 3));
  hold.held.wait(false);
  CHECK(!ranks.workers.start([](int32_t) {}, 3));  // busy
  CHECK(cancel.cancel(std::nullopt, std::make_exception_ptr(std::runtime_error("stop"))));
  CHECK(!cancel.cancel(0, nullptr));
  execution.wake_all();
  hold.released = true;
  hold.released.notify_all();
  while (!ranks.workers.wait_idle_for(std::chrono::milliseconds(50))) {
  }
  CHECK(!cancel.failure().id.has_value());
}

TEST(closed_workers_take_no_job) {
  WorkerGroup workers(2);
  workers.close();
  CHECK(!workers.start([](int32_t) {}, 2));
  workers.work(0);  // returns at once
}

}  // namespace
}  // namespace timelyfreeze::testing
