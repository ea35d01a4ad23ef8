#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/async_stream.h"
#include "runtime/worker_group.h"

namespace timelyfreeze {

// The stages of a model, each with a worker, and the stream that runs over them. Called from one thread, with the
// interpreter lock, which is released where it waits.
class AsyncPipeline {
 public:
  struct Report {
    std::optional<AsyncPlace> place;
    pybind11::object error;
  };

  AsyncPipeline(std::vector<std::shared_ptr<Stage>> stages, const std::vector<c10::Device>& devices, AsyncCalls calls,
                AsyncOptions options);

  // A worker's thread lends itself until `close`.
  void work(int32_t index);
  // Hands over a batch; begins a stream where there is none.
  void push(std::vector<AsyncInput> batch);
  // These return whether it was reached; where not, the stream has failed and `take_failure` says why.
  bool wait_for_losses(int64_t count, double timeout_s);
  bool settle(double timeout_s);
  bool drain(double timeout_s);
  std::vector<AsyncLoss> take_losses(int64_t count);
  // What the actions took that have ended since the last call, of a stream that was `timed`.
  std::vector<AsyncTime> take_times();
  Report take_failure();
  // Lets go of a stream that has been drained, and of what is left of its losses.
  void forget();
  // Gives up what is in flight.
  void abandon();
  void close();

  [[nodiscard]] bool is_open() const { return stream_ != nullptr; }
  [[nodiscard]] const AsyncLedger& ledger() const { return ledger_; }

  int64_t num_microbatches = 0;  // that were ever pushed: random numbers depend on it
  bool timed = false;            // whether the next stream keeps what its actions take

 private:
  bool wait(AsyncStream::Goal goal, int64_t count, double timeout_s);
  void take_down();
  void settle_stuck();

  const std::vector<std::shared_ptr<Stage>> stages_;
  std::vector<RankDevice> devices_;
  const AsyncCalls calls_;
  const AsyncOptions options_;
  AsyncLedger ledger_;
  std::vector<std::atomic<unsigned long>> thread_ids_;
  WorkerGroup workers_;
  std::shared_ptr<AsyncStream> stream_;
  std::shared_ptr<AsyncStream> stuck_;  // failed, and its user code has not come back yet
  std::optional<Report> failure_;
};

}  // namespace timelyfreeze
