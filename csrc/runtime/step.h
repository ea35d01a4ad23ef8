#pragma once
#include <ATen/ThreadLocalState.h>

#include <optional>
#include <utility>
#include <vector>

#include "runtime/pipeline.h"
#include "runtime/weight_queue.h"

namespace timelyfreeze {

// A loss that is NaN or infinite, and where that began.
struct NonFiniteLoss {
  int32_t microbatch;
  int32_t first_stage;
  bool or_below;  // other processes have the stages below
  double loss;
};

// One run of a program over the stages: where the values are, and what each action does.
class Pipeline::Step : public ActionRunner {
 public:
  Step(Pipeline& pipeline, StepRequest request);

  // A worker's share of the step: its rank's program, or, inline, everyone's.
  void work(int32_t index);
  // What this process receives in the step, in the order in which it is sent.
  [[nodiscard]] std::vector<Inbound> inbound() const;
  // What another process's action sent is here.
  void arrive(Arrival arrival);
  // Ends the step from outside; the first failure counts.
  void fail(std::exception_ptr error);
  void run(int32_t rank, const Instruction& instruction) override;
  // After the last action: waits for the devices, reads their clocks and losses (inside the step the host does not wait
  // for them), and cancels where a loss is not finite. Releases the interpreter lock.
  void finish();
  StepReport report();

  StepRequest request;
  EventLog log;
  CancelToken cancel;
  Execution execution;

 private:
  // What is sent to a stage for a micro-batch.
  struct Message {
    std::vector<Shipment> tensors;
    std::vector<bool> requires_grad;
    PyRef spec;
  };

  [[nodiscard]] size_t slot(const Action& action) const;
  [[nodiscard]] const RankDevice& device_of(int32_t stage) const;
  [[nodiscard]] const uint8_t* live_row(const Action& action) const;
  [[nodiscard]] bool forces_input_grad(const Action& action) const;
  [[nodiscard]] bool is_last(const Action& action) const;
  // Whether something of the stage trains for the micro-batch, and whether masks leave something out.
  [[nodiscard]] std::pair<bool, bool> trains_and_freezes(const Action& action) const;

  // Where the micro-batch's weight gradients wait; null where its backward is not split.
  const std::shared_ptr<WeightQueue>& queue_of(const Action& action);

  void forward(const Instruction& instruction);
  // The whole of it, or, inside a DeferScope, without the weight gradients that can wait.
  void backward(const Instruction& instruction);
  void weight_grad(const Action& action);
  Value receive(const Action& action, bool record, Held& held);
  void send_on(const Instruction& instruction, Value value, const std::string& spec, bool carries_grad, Held& held);
  void send_grads(const Instruction& instruction, const Held& held);
  void send_away(const Instruction& instruction, int32_t stage, const Packet& packet) const;
  void keep_output(const Action& action, const pybind11::object& output);
  void take_loss(const Action& action, const pybind11::object& loss, bool record, Held& held);
  void check_finite(const Action& action, const at::Tensor& loss) const;
  void read_device_times();
  void check_device_losses();

  Pipeline& pipeline_;
  const size_t num_microbatches_;
  const at::ThreadLocalState caller_;
  std::vector<Message> inbox_;                        // a (stage, micro-batch)
  std::vector<std::vector<Shipment>> gradients_;      // a (stage, micro-batch): of the stage's outputs
  std::vector<Held> held_;                            // a (stage, micro-batch)
  std::vector<uint8_t> recorded_;                     // a (stage, micro-batch): whether forward recorded a graph
  std::vector<uint8_t> split_;                        // a (stage, micro-batch): whether it has I and W
  bool splits_ = false;                               // whether any has
  std::vector<PendingBytes> pending_;                 // a rank
  std::vector<std::shared_ptr<WeightQueue>> queues_;  // a (stage, micro-batch)
  std::vector<double> transits_s_;                    // an action; NaN: nothing of it came from another process
  StepReport result_;
  std::vector<std::optional<c10::Event>> started_;  // an action, on accelerators
  std::vector<std::optional<c10::Event>> ended_;
  std::vector<std::optional<c10::Event>> origin_;  // a rank
};

}  // namespace timelyfreeze
