#pragma once
#include <c10/core/Device.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/program.h"
#include "runtime/device.h"
#include "runtime/execution.h"
#include "runtime/python_ref.h"
#include "runtime/stage.h"
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

// What it left. Where it failed, `error` is set and nothing else but the times is.
struct StepReport {
  std::vector<at::Tensor> losses;         // a micro-batch: mean or sum, detached
  std::vector<pybind11::object> counts;   // a micro-batch, or none
  std::vector<pybind11::object> outputs;  // a micro-batch, if asked for
  std::vector<std::vector<at::Tensor>> input_grads;
  std::vector<double> start_s;
  std::vector<double> end_s;
  std::vector<ActionId> skipped;            // backwards that had no graph to run through
  std::vector<int64_t> peak_pending_bytes;  // a rank: what waiting weight gradients kept from being freed
  std::optional<ActionId> failed;
  std::optional<pybind11::object> error;
};

// The stages of a model on their devices, and the workers that run programs over them.
class Pipeline {
 public:
  Pipeline(std::vector<std::shared_ptr<Stage>> stages, const std::vector<int32_t>& stage_to_rank,
           const std::vector<c10::Device>& devices);

  // A rank's thread lends itself until `close`. Releases the interpreter lock.
  void work(int32_t rank);
  // Runs one step from the calling thread, which holds the interpreter lock; gradients are not committed yet.
  // Throws only where the pipeline cannot run at all; what the stages throw is in the report.
  StepReport run(StepRequest request);
  // Ends a training step: adds its gradients (factors: a stage, a parameter) or forgets them.
  void commit(const std::vector<std::vector<double>>& factors);
  void abort();
  void close();

 private:
  class Step;

  void wait(Step& step, double timeout_s);
  void settle();
  void take_back_interrupts();

  std::vector<std::shared_ptr<Stage>> stages_;
  std::vector<int32_t> stage_to_rank_;
  std::vector<RankDevice> devices_;
  std::vector<std::atomic<unsigned long>> thread_ids_;
  WorkerGroup workers_;
  std::shared_ptr<Step> stuck_;  // a cancelled step whose user code has not come back yet
  // Which of a stage's inputs carried a gradient last: where one is forced, the others (a float mask, say) get none.
  std::vector<std::vector<bool>> differentiable_inputs_;
  bool open_step_ = false;  // gradients are set aside
};

}  // namespace timelyfreeze
