#pragma once
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "runtime/async_stream.h"
#include "runtime/worker_group.h"

namespace timelyfreeze {

// The stages of a model, each with a worker, and the stream that runs over them. Or one of them, where the others are
// processes of their own: they are null here. Called from one thread, with the interpreter lock, which is released
// where it waits.
class AsyncPipeline {
 public:
  struct Report {
    std::optional<AsyncPlace> place;
    pybind11::object error;
  };

  AsyncPipeline(std::vector<std::shared_ptr<Stage>> stages, const std::vector<c10::Device>& devices, AsyncCalls calls,
                AsyncOptions options);

  // Where there are other processes: how to reach them, and what to call, with the interpreter lock, from another
  // thread, where a stream fails by itself. After a failure the old transport is of no more use.
  void connect(std::shared_ptr<Transport> transport, AsyncLink::Peers peers, std::shared_ptr<NormBoard> norms,
               pybind11::object on_failure);
  // Ends what runs just now with a Python exception. From any thread that has the interpreter lock.
  void fail(const pybind11::object& error);
  // What the one stage here is doing; none: it waits.
  [[nodiscard]] std::optional<AsyncPlace> running() const;
  // Why the stream has failed, if it has.
  std::optional<Report> failure();

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
  void skip_losses(int64_t count) const { stream_->skip_losses(count); }
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
  void begin();
  void take_down();
  void settle_stuck();

  const std::vector<std::shared_ptr<Stage>> stages_;
  const std::vector<int32_t> local_;  // those that are here
  std::vector<RankDevice> devices_;
  const AsyncCalls calls_;
  const AsyncOptions options_;
  AsyncLedger ledger_;
  std::vector<std::atomic<unsigned long>> thread_ids_;
  WorkerGroup workers_;
  std::shared_ptr<AsyncStream> stream_;
  std::shared_ptr<AsyncStream> stuck_;  // failed, and its user code has not come back yet
  std::optional<Report> failure_;
  std::optional<Report> told_;  // of the stream that is still there
  std::shared_ptr<Transport> transport_;
  std::shared_ptr<NormBoard> norms_;
  AsyncLink::Peers peers_;
  PyRef on_failure_;
  const std::shared_ptr<SpecCache> specs_ = std::make_shared<SpecCache>();
};

}  // namespace timelyfreeze
