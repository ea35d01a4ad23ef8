#pragma once
#include <c10/core/Device.h>

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "core/cancel.h"
#include "core/program.h"
#include "runtime/device.h"
#include "runtime/execution.h"
#include "runtime/python_ref.h"
#include "runtime/specs.h"
#include "runtime/stage.h"
#include "runtime/transport.h"
#include "runtime/worker_group.h"

namespace timelyfreeze {

// Everything that one run of a program needs to know.
struct StepRequest {
  std::shared_ptr<const Program> program;
  bool train = true;        // false: forward only, nothing recorded
  bool run_inline = false;  // one worker walks all ranks
  bool check_finite = true;
  bool return_outputs = false;
  uint64_t seed = 0;
  uint64_t step = 0;
  double timeout_s = 600.0;
  std::vector<Value> inputs;                 // one a micro-batch
  std::vector<pybind11::object> targets;     // one a micro-batch, or none
  pybind11::object loss_fn;                  // None: the last stage takes the target and returns the loss
  std::vector<double> weights;               // of each micro-batch's mean loss; a (sum, count) loss ignores them
  std::optional<int64_t> max_pending_bytes;  // a rank: what waiting weight gradients may keep from being freed
  std::optional<at::Tensor> grad_scale;      // multiplies the gradient of every loss
  std::vector<at::Tensor> live;              // a stage: uint8 [microbatches, parameters]; none: nothing is frozen
  std::vector<at::Tensor> needs_input_grad;  // a stage: uint8 [microbatches]: wanted even where nothing below is live
};

// What it left. Where it failed, `error` is set and nothing else but the times is. Where the other ranks are processes
// of their own, all of it is about this rank's stages and actions.
struct StepReport {
  std::vector<at::Tensor> losses;         // a micro-batch: mean or sum, detached
  std::vector<pybind11::object> counts;   // a micro-batch, or none
  std::vector<pybind11::object> outputs;  // a micro-batch, if asked for
  std::vector<std::vector<at::Tensor>> input_grads;
  double origin_s = 0.0;  // when the step began, on the steady clock of rank 0
  std::vector<double> start_s;
  std::vector<double> end_s;
  std::vector<std::pair<ActionId, double>> transits_s;  // how long what an action sent here was on its way
  std::vector<ActionId> skipped;                        // backwards that had no graph to run through
  std::vector<int64_t> peak_pending_bytes;              // a rank: what waiting weight gradients kept from being freed
  std::optional<ActionId> failed;
  std::optional<pybind11::object> error;
};

// Tensors for another rank, or from one, outside of a step; `text` says what they are.
struct Parcel {
  int32_t peer;
  std::vector<std::optional<at::Tensor>> tensors;
  std::string text;
};

// The stages of a model on their devices, and the workers that run programs over them. Either all ranks are threads of
// this process, or this process is one of them: then it has that rank's stages only (the others are null) and is
// connected to the other ranks by a transport.
class Pipeline {
 public:
  Pipeline(std::vector<std::shared_ptr<Stage>> stages, const std::vector<int32_t>& stage_to_rank,
           const std::vector<c10::Device>& devices, std::optional<int32_t> own_rank);

  // `peers`: the transport's number of each of the pipeline's ranks. After a failed step the old transport is of no
  // more use.
  void connect(std::shared_ptr<Transport> transport, std::vector<int32_t> peers);
  void set_clock(double timeout_s);
  // Every rank's text to every rank; all call it together. Throws what broke it.
  std::vector<std::string> exchange(const std::string& own, double timeout_s);
  // Sends all of `parcels`, then receives one from each of `sources`, in that order.
  std::vector<Parcel> transfer(const std::vector<Parcel>& parcels, const std::vector<int32_t>& sources,
                               double timeout_s);
  // Ends what runs just now with a Python exception. From any thread; does nothing where nothing runs.
  void cancel(const pybind11::object& error);

  // What this process's rank is running just now; none: it waits. From any thread.
  [[nodiscard]] std::optional<Action> running_action() const;

  // A worker's thread lends itself until `close`. Releases the interpreter lock.
  void work(int32_t index);
  // Runs one step from the calling thread, which holds the interpreter lock; gradients are not committed yet.
  // Throws only where the pipeline cannot run at all; what the stages throw is in the report.
  StepReport run(StepRequest request);
  // Ends a training step: adds its gradients (factors: a stage, a parameter) or forgets them.
  void commit(const std::vector<std::vector<double>>& factors);
  void abort();
  void close();

 private:
  class Step;
  static constexpr int64_t kNoAction = -1;
  // What `cancel` ends: a step, or a job on the transport.
  struct Running {
    CancelToken& token;
    std::function<void()> wake;
  };

  [[nodiscard]] bool is_local(int32_t stage) const { return stages_[static_cast<size_t>(stage)] != nullptr; }
  [[nodiscard]] int32_t num_workers() const { return own_rank_ ? 1 : static_cast<int32_t>(devices_.size()); }
  void set_running(const Action* action);
  void run_job(const std::function<void()>& job, double timeout_s);
  void wait(const Running& running, double timeout_s);
  void settle();

  std::vector<std::shared_ptr<Stage>> stages_;
  std::vector<int32_t> stage_to_rank_;
  std::vector<RankDevice> devices_;
  std::optional<int32_t> own_rank_;
  std::shared_ptr<Transport> transport_;
  std::vector<int32_t> peers_;
  SpecCache specs_;
  std::mutex running_mutex_;
  const Running* running_ = nullptr;
  std::vector<std::atomic<unsigned long>> thread_ids_;
  WorkerGroup workers_;
  std::shared_ptr<Step> stuck_;  // a cancelled step whose user code has not come back yet
  // Which of a stage's inputs carried a gradient last: where one is forced, the others (a float mask, say) get none.
  std::vector<std::vector<bool>> differentiable_inputs_;
  bool open_step_ = false;                          // gradients are set aside
  std::atomic<int64_t> running_action_{kNoAction};  // packed; only where this process is one rank
};

}  // namespace timelyfreeze
