// What the actions of an asynchronous stream do: forward, backward, update.
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/full_like.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/async_stream.h"
#include "runtime/rng.h"
#include "runtime/stage_run.h"

namespace py = pybind11;

namespace timelyfreeze {
namespace {

// While it lives, the parameters have the values of `stash`. Their graphs' saved tensors are the parameters themselves,
// so that backward sees these, or views of the memory that they had in forward, which is the stash's.
class StashGuard {
 public:
  StashGuard(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& stash)
      : parameters_(parameters) {
    for (size_t i = 0; i < parameters_.size(); ++i) {
      now_.push_back(parameters_[i].variable_data());
      parameters_[i].set_data(stash[i]);
    }
  }
  ~StashGuard() {
    for (size_t i = 0; i < parameters_.size(); ++i) parameters_[i].set_data(now_[i]);
  }
  StashGuard(const StashGuard&) = delete;
  StashGuard& operator=(const StashGuard&) = delete;

 private:
  const std::vector<at::Tensor>& parameters_;
  std::vector<at::Tensor> now_;
};

}  // namespace

void AsyncStream::Window::add(double weight, int64_t accumulation) {
  if (size++ == 0) nominal = (weight > 0.0 ? weight : 1.0) * static_cast<double>(accumulation);
  sum += weight;
}

uint64_t AsyncStream::seed_of(int32_t stage, char kind, int64_t m) const {
  return mix_seed(options_.seed, static_cast<uint64_t>(first_microbatch_ + m), static_cast<uint64_t>(stage),
                  static_cast<uint64_t>(kind), 0);
}

const uint8_t* AsyncTicket::live_row(int32_t stage) const {
  if (masks == nullptr) return nullptr;
  const at::Tensor& live = masks->live[static_cast<size_t>(stage)];
  return live.const_data_ptr<uint8_t>() + static_cast<int64_t>(place) * live.size(1);
}

bool AsyncTicket::forces_input_grad(int32_t stage) const {
  return masks != nullptr && stage > 0 &&
         masks->needs_input_grad[static_cast<size_t>(stage)].const_data_ptr<uint8_t>()[place] != 0;
}

bool AsyncStream::trains(int32_t stage, const uint8_t* live) const {
  const auto& parameters = stages_[static_cast<size_t>(stage)]->parameters();
  for (size_t i = 0; i < parameters.size(); ++i) {
    if ((live == nullptr || live[i] != 0) && parameters[i].requires_grad()) return true;
  }
  return false;
}

// How many updates will fall between a micro-batch's forward, which is next, and its backward: the order is fixed.
int64_t AsyncStream::num_updates_ahead(int32_t stage, int64_t m) const {
  const int64_t num_backwards = std::max<int64_t>(m - most_outstanding(stage) + 1, 0);
  return m / options_.accumulation - num_backwards / options_.accumulation;
}

AsyncStream::Message AsyncStream::take_message(int32_t stage, int64_t m) {
  auto& inbox = runs_[static_cast<size_t>(stage)].inbox;
  if (stage > 0 && is_local(stage - 1)) return std::move(inbox[static_cast<size_t>(m) % inbox.size()]);
  AsyncInput input;
  {
    const std::lock_guard lock(mutex_);
    input = std::move(inputs_.front());
    inputs_.pop_front();
  }
  if (stage > 0) {
    Message message = std::move(inbox[static_cast<size_t>(m) % inbox.size()]);
    message.ticket = std::move(input.ticket);
    norms_->learn(message.norms.data());
    return message;
  }
  Message message{{}, {}, std::move(input.value.spec), std::move(input.ticket), {}};
  for (const at::Tensor& tensor : input.value.tensors) message.tensors.push_back({tensor.detach(), nullptr});
  message.requires_grad.resize(message.tensors.size());
  return message;
}

Value AsyncStream::receive(int32_t stage, const Message& message, bool record, Held& held) const {
  Value value{{}, message.spec};
  held.inputs.resize(message.tensors.size());
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    at::Tensor tensor = devices_[static_cast<size_t>(stage)].receive(message.tensors[i]);
    if (record && message.requires_grad[i]) tensor = require_input_grad(tensor, held.inputs[i]);
    value.tensors.push_back(std::move(tensor));
  }
  return value;
}

void AsyncStream::forward(int32_t stage, int64_t m) {
  const RankDevice& device = devices_[static_cast<size_t>(stage)];
  const c10::OptionalStreamGuard stream(device.compute_stream());
  const ActionRng rng(seed_of(stage, 'F', m), device.device());
  Slot& own = slot(stage, m);
  Message message = take_message(stage, m);
  const auto& flags = message.requires_grad;
  own.ticket = std::move(message.ticket);
  own.updates_at_forward = ledger_.num_updates(stage);
  const uint8_t* live = own.ticket.live_row(stage);
  own.recorded = trains(stage, live) || own.ticket.forces_input_grad(stage) ||
                 std::find(flags.begin(), flags.end(), true) != flags.end();
  // The last stage's backward comes next: it would keep the graph of one micro-batch either way.
  own.recomputes = own.recorded && options_.recompute && !is_last(stage);
  const bool records = own.recorded && !own.recomputes;
  const c10::AutoGradMode grad_mode(records);
  const MaskGuard mask(*stages_[static_cast<size_t>(stage)], live);
  Value input = receive(stage, message, records, own.held);
  if (own.recomputes) keep_for_recompute(own, stage, message);
  message = Message();
  const py::gil_scoped_acquire gil;
  const bool loss_inside = is_last(stage) && calls_.loss_fn.is_none();
  const py::object target = is_last(stage) ? *own.ticket.target : py::none();
  py::object output;
  {
    const WeightPrediction::Guard ahead(runs_[static_cast<size_t>(stage)].prediction, num_updates_ahead(stage, m));
    output = stages_[static_cast<size_t>(stage)]->call(input, loss_inside ? target : py::none());
  }
  input = Value();  // here, where the interpreter lock is held: its tensors have Python objects now
  if (!is_last(stage)) {
    Value value = stages_[static_cast<size_t>(stage)]->take_apart(output);
    output = py::object();
    std::string spec;
    if (value.spec && !is_local(stage + 1)) spec = value.spec->attr("to_bytes")().cast<std::string>();
    const py::gil_scoped_release no_gil;
    send_on(stage, m, std::move(value), spec, own);
  } else if (loss_inside) {
    take_loss(output, own);
  } else {
    take_loss(call_loss(calls_.loss_fn, std::move(output), target), own);
  }
}

void AsyncStream::keep_for_recompute(Slot& own, int32_t stage, const Message& message) const {
  own.kept = {{}, message.requires_grad, message.spec, {}, {}};
  own.versions.clear();
  for (const Shipment& shipment : message.tensors) {
    const at::Tensor tensor = devices_[static_cast<size_t>(stage)].receive(shipment);
    own.kept.tensors.push_back({tensor, nullptr});
    own.versions.push_back(tensor.defined() ? static_cast<int64_t>(tensor._version()) : 0);
  }
}

void AsyncStream::send_on(int32_t stage, int64_t m, Value value, const std::string& spec, Slot& own) {
  std::vector<bool> flags;
  if (!own.recomputes) {
    // Where masks have frozen the stage, a mark that user code makes on its output says nothing.
    const bool carries_grad = own.recorded || own.ticket.masks == nullptr;
    flags = keep_outputs(value, carries_grad, own.held);
  } else {
    // Without a graph nobody knows yet which outputs a gradient can go back through.
    for (const at::Tensor& tensor : value.tensors) flags.push_back(can_require_grad(tensor));
  }
  if (!is_local(stage + 1)) {
    send_forward_away(std::move(value), spec, std::move(flags), own.ticket);
    return;
  }
  auto& inbox = runs_[static_cast<size_t>(stage) + 1].inbox;
  Message& message = inbox[static_cast<size_t>(m) % inbox.size()];
  message.requires_grad = std::move(flags);
  message.spec = std::move(value.spec);
  message.ticket = own.ticket;
  own.ticket.target = nullptr;
  for (const at::Tensor& tensor : value.tensors) {
    message.tensors.push_back(
        devices_[static_cast<size_t>(stage)].send(tensor, devices_[static_cast<size_t>(stage) + 1]));
  }
  runs_[static_cast<size_t>(stage) + 1].num_forwards.store(m + 1, std::memory_order_release);
  ring(stage + 1);
}

void AsyncStream::take_loss(const py::object& loss, Slot& own) {
  const auto [tensor, count] = split_loss(loss);
  own.ticket.target = nullptr;
  own.loss.tensor = tensor.detach();
  if (count) own.loss.count = own.ticket.weight = py::float_(count).cast<double>();
  if (own.recorded) {
    if (!tensor.requires_grad() && own.ticket.masks == nullptr) throw_constant_loss();
    if (tensor.requires_grad()) own.held.loss = tensor;
  }
  add_loss(own.loss);
}

void AsyncStream::add_loss(AsyncLoss loss) {
  {
    const std::lock_guard lock(mutex_);
    if (num_skipped_losses_ > 0) {
      --num_skipped_losses_;
      return;
    }
    losses_.push_back(std::move(loss));
  }
  news_.notify_all();
}

void AsyncStream::backward(int32_t stage, int64_t m, bool has_younger) {
  const RankDevice& device = devices_[static_cast<size_t>(stage)];
  const c10::OptionalStreamGuard stream(device.compute_stream());
  StageRun& run = runs_[static_cast<size_t>(stage)];
  Slot own = std::exchange(slot(stage, m), Slot());
  Gradients gradients{{}, own.ticket.weight, 1.0, {}, {}};
  if (!is_last(stage)) gradients = std::exchange(run.gradients[static_cast<size_t>(m) % run.gradients.size()], {});
  own.ticket.weight = gradients.weight;
  if (!is_last(stage)) own.loss = std::move(gradients.loss);
  if (!gradients.norms.empty()) norms_->learn(gradients.norms.data());
  ledger_.count_backward(stage, ledger_.num_updates(stage) - own.updates_at_forward);
  run.window.add(gradients.weight, options_.accumulation);
  if (is_last(stage) && run.window.size == 1 && !calls_.loss_scale.is_none()) {
    const py::gil_scoped_acquire gil;
    gradients.scale = calls_.loss_scale().cast<double>();
  }
  if (!is_last(stage) || run.window.size == 1) run.window.scale = gradients.scale;
  if (own.recorded) {
    std::optional<StashGuard> stash;
    const auto stashed = run.stashes.find(own.updates_at_forward);
    if (stashed != run.stashes.end()) {
      stash.emplace(stages_[static_cast<size_t>(stage)]->parameters(), stashed->second);
    }
    const MaskGuard mask(*stages_[static_cast<size_t>(stage)], own.ticket.live_row(stage));
    if (own.recomputes) recompute(stage, m, own);
    const ActionRng rng(seed_of(stage, 'B', m), device.device());
    differentiate(stage, own, gradients.tensors);
  }
  // Copies of weights that no micro-batch waits for any more.
  const int64_t oldest = has_younger ? slot(stage, m + 1).updates_at_forward : ledger_.num_updates(stage);
  run.stashes.erase(run.stashes.begin(), run.stashes.lower_bound(oldest));
  if (stage > 0) send_grads(stage, m, own, gradients.weight, run.window.scale);
}

void AsyncStream::recompute(int32_t stage, int64_t m, Slot& own) {
  for (size_t i = 0; i < own.versions.size(); ++i) {
    const at::Tensor& tensor = own.kept.tensors[i].tensor;
    if (tensor.defined() && static_cast<int64_t>(tensor._version()) != own.versions[i]) {
      throw std::runtime_error("stage " + std::to_string(stage) +
                               " wrote its input in place, so its forward cannot be run again. Let it work on a copy, "
                               "or pass memory=\"keep\".");
    }
  }
  const ActionRng rng(seed_of(stage, 'F', m), devices_[static_cast<size_t>(stage)].device());
  const Value input = receive(stage, own.kept, /*record=*/true, own.held);
  own.kept = Message();
  const Stage& module = *stages_[static_cast<size_t>(stage)];
  const py::gil_scoped_acquire gil;
  Value value = module.take_apart(module.call(input, py::none()));
  keep_outputs(value, /*carries_grad=*/true, own.held);
}

void AsyncStream::differentiate(int32_t stage, Slot& own, const std::vector<Shipment>& arrived) {
  std::vector<at::Tensor> roots;
  std::vector<at::Tensor> grads;
  const Held& held = own.held;
  if (held.loss.defined()) {
    const Window& window = runs_[static_cast<size_t>(stage)].window;
    roots.push_back(held.loss);
    grads.push_back(
        at::full_like(held.loss, (own.loss.count ? 1.0 : own.ticket.weight) / window.nominal * window.scale));
  }
  for (size_t i = 0; i < std::min(arrived.size(), held.outputs.size()); ++i) {
    if (!arrived[i].tensor.defined() || !held.outputs[i].defined()) continue;
    roots.push_back(held.outputs[i]);
    grads.push_back(devices_[static_cast<size_t>(stage)].receive(arrived[i]));
  }
  if (roots.empty()) return;
  // The graph already has the dtypes that autocast chose; casting inside backward would change them again.
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  run_backward(roots, grads);
}

void AsyncStream::send_grads(int32_t stage, int64_t m, const Slot& own, double weight, double scale) {
  if (!is_local(stage - 1)) {
    send_grads_away(own, weight);
    return;
  }
  StageRun& below = runs_[static_cast<size_t>(stage) - 1];
  Gradients& gradients = below.gradients[static_cast<size_t>(m) % below.gradients.size()];
  gradients.weight = weight;
  gradients.scale = scale;
  for (size_t i = 0; i < own.held.inputs.size(); ++i) {
    gradients.tensors.push_back(
        devices_[static_cast<size_t>(stage)].send(own.held.input_grad(i), devices_[static_cast<size_t>(stage) - 1]));
  }
  below.num_gradients.store(m + 1, std::memory_order_release);
  ring(stage - 1);
}

void AsyncStream::update(int32_t stage, int64_t m, int64_t num_outstanding) {
  StageRun& run = runs_[static_cast<size_t>(stage)];
  const Window window = std::exchange(run.window, {});
  const auto& call = calls_.updates[static_cast<size_t>(stage)];
  if (call.is_none()) return;
  const RankDevice& device = devices_[static_cast<size_t>(stage)];
  const c10::OptionalStreamGuard stream(device.compute_stream());
  const ActionRng rng(seed_of(stage, 'U', m), device.device());
  if (options_.stash && num_outstanding > 0 &&
      slot(stage, m + num_outstanding).updates_at_forward == ledger_.num_updates(stage)) {
    stash_weights(stage);
  }
  const bool predicts = options_.predict && most_outstanding(stage) > 1;
  if (predicts) {
    const int64_t num_copies = run.prediction.before_update(stages_[static_cast<size_t>(stage)]->parameters());
    for (int64_t i = 0; i < num_copies; ++i) ledger_.count_copy();
  }
  {
    const py::gil_scoped_acquire gil;
    ledger_.count_update(stage, call(window.factor()).cast<bool>());
  }
  if (predicts) run.prediction.after_update();
}

// The memory that forward saw stays the stash's, and the parameters go on in a copy.
void AsyncStream::stash_weights(int32_t stage) {
  std::vector<at::Tensor>& stash = runs_[static_cast<size_t>(stage)].stashes[ledger_.num_updates(stage)];
  if (!stash.empty()) return;  // the update before was skipped
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : stages_[static_cast<size_t>(stage)]->parameters()) {
    stash.push_back(parameter.variable_data());
    if (parameter.requires_grad()) parameter.set_data(parameter.variable_data().clone());
  }
  ledger_.count_copy();
}

}  // namespace timelyfreeze
