#include "runtime/step.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <ATen/ops/isfinite.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "runtime/deferred_grad.h"
#include "runtime/rng.h"
#include "runtime/stage_run.h"

namespace py = pybind11;

namespace timelyfreeze {

Pipeline::Step::Step(Pipeline& pipeline, StepRequest step_request)
    : request(std::move(step_request)),
      log(request.program->num_actions()),
      execution(*request.program, *this, cancel, log),
      pipeline_(pipeline),
      num_microbatches_(request.inputs.size()),
      inbox_(pipeline.stages_.size() * num_microbatches_),
      gradients_(inbox_.size()),
      held_(inbox_.size()),
      recorded_(inbox_.size()),
      split_(inbox_.size()),
      pending_(pipeline.devices_.size()),
      queues_(inbox_.size()),
      transits_s_(static_cast<size_t>(request.program->num_actions()), std::numeric_limits<double>::quiet_NaN()) {
  for (ActionId id = 0; id < request.program->num_actions(); ++id) {
    const Action& action = request.program->at(id).action;
    if (action.kind != Kind::input_grad) continue;
    split_[slot(action)] = 1;
    splits_ = true;
  }
  for (PendingBytes& pending : pending_) pending.cap = request.max_pending_bytes.value_or(pending.cap);
  result_.losses.resize(num_microbatches_);
  result_.counts.resize(num_microbatches_);
  result_.outputs.resize(num_microbatches_);
  result_.input_grads.resize(num_microbatches_);
  const bool timed = std::any_of(pipeline.devices_.begin(), pipeline.devices_.end(),
                                 [](const RankDevice& device) { return device.is_accelerator(); });
  if (timed) {
    started_.resize(static_cast<size_t>(request.program->num_actions()));
    ended_.resize(started_.size());
  }
  for (const RankDevice& device : pipeline.devices_) {
    device.follow_caller();
    origin_.push_back(device.mark());
  }
  for (size_t m = 0; m < num_microbatches_; ++m) {
    Message& message = inbox_[m];
    for (const at::Tensor& tensor : request.inputs[m].tensors) {
      message.tensors.push_back({tensor, nullptr});
      message.requires_grad.push_back(request.train && tensor.requires_grad());
    }
    message.spec = request.inputs[m].spec;
  }
}

size_t Pipeline::Step::slot(const Action& action) const {
  return static_cast<size_t>(action.stage) * num_microbatches_ + static_cast<size_t>(action.microbatch);
}

const RankDevice& Pipeline::Step::device_of(int32_t stage) const {
  return pipeline_.devices_[static_cast<size_t>(pipeline_.stage_to_rank_[static_cast<size_t>(stage)])];
}

const uint8_t* Pipeline::Step::live_row(const Action& action) const {
  if (request.live.empty()) return nullptr;
  const at::Tensor& live = request.live[static_cast<size_t>(action.stage)];
  return live.const_data_ptr<uint8_t>() + action.microbatch * live.size(1);
}

bool Pipeline::Step::forces_input_grad(const Action& action) const {
  return !request.needs_input_grad.empty() && action.stage > 0 &&
         request.needs_input_grad[static_cast<size_t>(action.stage)].const_data_ptr<uint8_t>()[action.microbatch] != 0;
}

bool Pipeline::Step::is_last(const Action& action) const {
  return static_cast<size_t>(action.stage) + 1 == pipeline_.stages_.size();
}

std::pair<bool, bool> Pipeline::Step::trains_and_freezes(const Action& action) const {
  const auto& trainable = pipeline_.stages_[static_cast<size_t>(action.stage)]->trainable();
  const uint8_t* live = live_row(action);
  bool trains = false;
  bool freezes = false;
  for (size_t i = 0; i < trainable.size(); ++i) {
    if (!trainable[i]) continue;
    if (live == nullptr || live[i] != 0) {
      trains = true;
    } else {
      freezes = true;
    }
  }
  return {trains, freezes};
}

void Pipeline::Step::work(int32_t index) {
  const at::ThreadLocalStateGuard caller(caller_);  // autocast, modes and hooks of the thread that called step()
  if (pipeline_.own_rank_) {
    execution.run_rank(*pipeline_.own_rank_);
    if (cancel.cancelled()) return;
    try {
      pipeline_.transport_->flush();
    } catch (...) {
      fail(std::current_exception());
    }
  } else if (request.run_inline) {
    execution.run_inline();
  } else {
    execution.run_rank(index);
  }
}

void Pipeline::Step::fail(std::exception_ptr error) {
  cancel.cancel(std::nullopt, std::move(error));
  execution.wake_all();
}

void Pipeline::Step::run(int32_t rank, const Instruction& instruction) {
  const RankDevice& device = pipeline_.devices_[static_cast<size_t>(rank)];
  const Action& action = instruction.action;
  const c10::OptionalStreamGuard stream(device.compute_stream());
  const ActionRng rng(mix_seed(request.seed, request.step, static_cast<uint64_t>(action.stage),
                               static_cast<uint64_t>(action.kind), static_cast<uint64_t>(action.microbatch)),
                      device.device());
  const auto id = static_cast<size_t>(instruction.id);
  struct Mark {  // also where the action throws
    explicit Mark(Pipeline& of, const Action& now) : pipeline(of) { pipeline.set_running(&now); }
    ~Mark() { pipeline.set_running(nullptr); }
    Pipeline& pipeline;
  } const mark(pipeline_, action);
  if (device.is_accelerator()) started_[id] = device.mark();
  if (action.kind != Kind::forward && recorded_[slot(action)] == 0) {
    // Below the micro-batch's cut there is no graph. A gradient may have been sent all the same, to be timed.
    gradients_[slot(action)].clear();
    if (action.kind != Kind::weight_grad) send_grads(instruction, {});
  } else if (action.kind == Kind::weight_grad) {
    weight_grad(action);
  } else {
    const Stage& stage = *pipeline_.stages_[static_cast<size_t>(action.stage)];
    const MaskGuard mask(stage, request.train ? live_row(action) : nullptr);
    std::optional<DeferScope> defer;
    if (const auto& queue = queue_of(action)) defer.emplace(queue, stage);
    if (action.kind == Kind::forward) {
      forward(instruction);
    } else {
      backward(instruction);
    }
  }
  if (device.is_accelerator()) ended_[id] = device.mark();
}

void Pipeline::Step::forward(const Instruction& instruction) {
  const Action& action = instruction.action;
  const Stage& stage = *pipeline_.stages_[static_cast<size_t>(action.stage)];
  const auto& carried = inbox_[slot(action)].requires_grad;
  const bool needs_input_grad =
      forces_input_grad(action) || std::find(carried.begin(), carried.end(), true) != carried.end();
  const auto [trains, freezes] = trains_and_freezes(action);
  const bool record = request.train && (trains || needs_input_grad);
  recorded_[slot(action)] = record ? 1 : 0;

  // Where nothing of the stage and nothing below it trains, autograd is off: no graph, and no activation is kept.
  const c10::AutoGradMode grad_mode(record);
  Held& held = held_[slot(action)];
  Value input = receive(action, record, held);
  const py::gil_scoped_acquire gil;
  const bool last = is_last(action);
  if (last && action.stage > 0 && !pipeline_.is_local(action.stage - 1)) held.received = input.tensors;
  const bool has_target = !request.targets.empty();
  const bool loss_inside = last && has_target && request.loss_fn.is_none();
  const py::object target = last && has_target ? request.targets[static_cast<size_t>(action.microbatch)] : py::none();
  py::object output = stage.call(input, loss_inside ? target : py::none());
  input = Value();  // here, where the interpreter lock is held: its tensors have Python objects now
  if (!last) {
    Value value = stage.take_apart(output);
    std::string spec;
    if (value.spec && !pipeline_.is_local(action.stage + 1)) {
      spec = value.spec->attr("to_bytes")().cast<std::string>();
    }
    const py::gil_scoped_release no_gil;
    // User code may mark its output by hand, so that checkpointed regions above get gradients. Where masks have frozen
    // the stage that mark says nothing: what the stage above needs is in `needs_input_grad`.
    send_on(instruction, std::move(value), spec, /*carries_grad=*/record || !freezes, held);
  } else if (loss_inside) {
    take_loss(action, output, record, held);
  } else {
    if (request.return_outputs) keep_output(action, output);
    if (has_target) {
      take_loss(action, call_loss(request.loss_fn, std::move(output), target), record, held);
    }
  }
  if (!record) held = Held();
}

void Pipeline::Step::keep_output(const Action& action, const py::object& output) {
  Value value = pipeline_.stages_.back()->take_apart(output);
  for (at::Tensor& tensor : value.tensors) tensor = tensor.detach();
  result_.outputs[static_cast<size_t>(action.microbatch)] =
      value.spec ? value.spec->attr("decode")(value.tensors) : py::cast(value.tensors.at(0));
}

void Pipeline::Step::take_loss(const Action& action, const py::object& loss, bool record, Held& held) {
  const auto m = static_cast<size_t>(action.microbatch);
  const auto [tensor, count] = split_loss(loss);
  result_.counts[m] = count;
  result_.losses[m] = tensor.detach();
  if (request.check_finite && tensor.is_cpu()) check_finite(action, tensor);
  held.received.clear();
  if (!record) return;
  if (!tensor.requires_grad() && request.live.empty()) {
    throw_constant_loss();
  }
  if (tensor.requires_grad()) held.loss = tensor;
}

// The held outputs of the stages below may be read here: their backward cannot have begun.
void Pipeline::Step::check_finite(const Action& action, const at::Tensor& loss) const {
  const double value = loss.item().toComplexDouble().real();
  if (std::isfinite(value)) return;
  const at::NoGradGuard no_grad;
  int32_t first = action.stage;
  bool or_below = false;
  for (const at::Tensor& tensor : held_[slot(action)].received) {
    or_below = or_below || (can_require_grad(tensor) && !at::isfinite(tensor).all().item<bool>());
  }
  if (or_below) throw NonFiniteLoss{action.microbatch, action.stage - 1, action.stage > 1, value};
  for (int32_t stage = action.stage - 1; stage >= 0; --stage) {
    for (const at::Tensor& output : held_[slot({stage, Kind::forward, action.microbatch})].outputs) {
      if (can_require_grad(output) && !at::isfinite(output).all().item<bool>()) first = stage;
    }
  }
  throw NonFiniteLoss{action.microbatch, first, false, value};
}

void Pipeline::Step::check_device_losses() {
  if (!request.check_finite || !request.train) return;
  for (ActionId id = 0; id < request.program->num_actions(); ++id) {
    const Action& action = request.program->at(id).action;
    const at::Tensor& loss = result_.losses[static_cast<size_t>(action.microbatch)];
    if (action.kind != Kind::forward || !is_last(action) || !loss.defined() || loss.is_cpu()) continue;
    const double value = loss.item().toComplexDouble().real();
    if (std::isfinite(value)) continue;
    cancel.cancel(id, std::make_exception_ptr(NonFiniteLoss{action.microbatch, action.stage, false, value}));
    return;
  }
}

void Pipeline::Step::backward(const Instruction& instruction) {
  const Action& action = instruction.action;
  const Held held = std::move(held_[slot(action)]);
  const std::vector<Shipment> arrived = std::move(gradients_[slot(action)]);
  const RankDevice& device = device_of(action.stage);
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> root_grads;
  if (held.loss.defined()) {
    const auto m = static_cast<size_t>(action.microbatch);
    at::Tensor seed = at::full_like(held.loss, result_.counts[m] ? 1.0 : request.weights[m]);
    if (request.grad_scale) seed.mul_(request.grad_scale->to(seed.options()));
    roots.push_back(held.loss);
    root_grads.push_back(std::move(seed));
  }
  for (size_t i = 0; i < std::min(arrived.size(), held.outputs.size()); ++i) {
    if (!arrived[i].tensor.defined() || !held.outputs[i].defined()) continue;
    roots.push_back(held.outputs[i]);
    root_grads.push_back(device.receive(arrived[i]));
  }
  if (!roots.empty()) {
    // The graph already has the dtypes that autocast chose; casting inside backward would change them again.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    std::optional<WeightQueue::Open> open;
    if (const auto& queue = queue_of(action)) open.emplace(*queue);
    run_backward(roots, root_grads);
    if (splits_) pipeline_.stages_[static_cast<size_t>(action.stage)]->unshare_gradients();
  }
  if (action.stage == 0) {
    auto& grads = result_.input_grads[static_cast<size_t>(action.microbatch)];
    const bool wanted = std::any_of(held.inputs.begin(), held.inputs.end(), [](const NodePtr& node) { return node; });
    for (size_t i = 0; wanted && i < held.inputs.size(); ++i) grads.push_back(held.input_grad(i));
    return;
  }
  send_grads(instruction, held);
}

const std::shared_ptr<WeightQueue>& Pipeline::Step::queue_of(const Action& action) {
  std::shared_ptr<WeightQueue>& queue = queues_[slot(action)];
  if (split_[slot(action)] != 0 && queue == nullptr) {
    const auto rank = pipeline_.stage_to_rank_[static_cast<size_t>(action.stage)];
    queue = std::make_shared<WeightQueue>(pending_[static_cast<size_t>(rank)]);
  }
  return queue;
}

void Pipeline::Step::weight_grad(const Action& action) {
  if (const auto queue = std::exchange(queues_[slot(action)], nullptr)) queue->run();
}

void Pipeline::Step::finish() {
  const py::gil_scoped_release no_gil;
  at::autocast::clear_cache();
  if (started_.empty()) return;
  read_device_times();
  check_device_losses();
}

void Pipeline::Step::read_device_times() {
  for (const RankDevice& device : pipeline_.devices_) {
    device.lead_caller();
    device.synchronize();
  }
  constexpr double kMilli = 1e-3;
  for (ActionId id = 0; static_cast<size_t>(id) < started_.size(); ++id) {
    const auto& origin = origin_[static_cast<size_t>(request.program->rank_of(id))];
    const auto index = static_cast<size_t>(id);
    if (!origin || !started_[index] || !ended_[index]) continue;
    log.set(id, origin->elapsedTime(*started_[index]) * kMilli, origin->elapsedTime(*ended_[index]) * kMilli);
  }
}

StepReport Pipeline::Step::report() {
  result_.origin_s = log.origin_s() + (pipeline_.transport_ ? pipeline_.transport_->clock_offset_s() : 0.0);
  result_.start_s = log.start_s();
  result_.end_s = log.end_s();
  for (ActionId id = 0; id < request.program->num_actions(); ++id) {
    const Action& action = request.program->at(id).action;
    if (!std::isnan(transits_s_[static_cast<size_t>(id)]))
      result_.transits_s.emplace_back(id, transits_s_[static_cast<size_t>(id)]);
    if (!pipeline_.is_local(action.stage)) continue;
    if (action.kind != Kind::forward && recorded_[slot(action)] == 0) result_.skipped.push_back(id);
  }
  for (const PendingBytes& pending : pending_) result_.peak_pending_bytes.push_back(pending.peak);
  return std::move(result_);
}

}  // namespace timelyfreeze
