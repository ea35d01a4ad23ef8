#pragma once
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <thread>
#include <vector>

#include "runtime/execution.h"
#include "runtime/worker_group.h"
#include "tests/schedules.h"

namespace timelyfreeze::testing {

struct NoWork : ActionRunner {
  void run(int32_t, const Instruction&) override {}
};

inline double microseconds_per_action(bool run_inline, int32_t num_stages, int32_t num_microbatches) {
  const Program program = make_program(num_stages, num_microbatches);
  WorkerGroup workers(num_stages);
  std::vector<std::thread> threads;
  for (int32_t rank = 0; rank < num_stages; ++rank) threads.emplace_back([&workers, rank] { workers.work(rank); });
  std::vector<double> times_us;
  NoWork runner;
  for (int round = 0; round < 201; ++round) {
    CancelToken cancel;
    EventLog log(program.num_actions());
    Execution execution(program, runner, cancel, log);
    const auto begin = std::chrono::steady_clock::now();
    workers.start([&](int32_t rank) { run_inline ? execution.run_inline() : execution.run_rank(rank); },
                  run_inline ? 1 : num_stages);
    while (!workers.wait_idle_for(std::chrono::milliseconds(100))) {
    }
    const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
    times_us.push_back(took.count() / program.num_actions());
  }
  workers.close();
  for (auto& thread : threads) thread.join();
  std::nth_element(times_us.begin(), times_us.begin() + 100, times_us.end());
  return times_us[100];
}

// Prints JSON: medians of 201 steps of 1F1B on actions that do nothing, hand-overs and waking included.
inline void print_cost_per_action() {
  std::printf("{\"threaded_2x64_us\": %.3f, \"inline_2x64_us\": %.3f, \"threaded_4x64_us\": %.3f}\n",
              microseconds_per_action(false, 2, 64), microseconds_per_action(true, 2, 64),
              microseconds_per_action(false, 4, 64));
}

}  // namespace timelyfreeze::testing
