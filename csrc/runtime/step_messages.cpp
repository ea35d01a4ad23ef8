// What a step's actions hand to each other: within the process, and to and from other processes.

#include <algorithm>
#include <utility>

#include "runtime/stage_run.h"
#include "runtime/step.h"

namespace timelyfreeze {

std::vector<Inbound> Pipeline::Step::inbound() const {
  std::vector<Inbound> all;
  if (!pipeline_.own_rank_) return all;
  for (int32_t rank = 0; rank < request.program->num_ranks(); ++rank) {
    if (rank == *pipeline_.own_rank_) continue;
    Inbound from{pipeline_.peers_[static_cast<size_t>(rank)], {}};
    for (const Instruction& instruction : request.program->rank(rank)) {
      const auto& readers = instruction.notifies;
      if (std::find(readers.begin(), readers.end(), *pipeline_.own_rank_) != readers.end())
        from.ids.push_back(instruction.id);
    }
    if (!from.ids.empty()) all.push_back(std::move(from));
  }
  return all;
}

void Pipeline::Step::arrive(Arrival arrival) {
  const Action& action = request.program->at(arrival.id).action;
  std::vector<Shipment> shipments;
  for (at::Tensor& tensor : arrival.packet.tensors) shipments.push_back({std::move(tensor), arrival.arrived});
  if (action.kind == Kind::forward) {
    inbox_[slot({action.stage + 1, action.kind, action.microbatch})] = {
        std::move(shipments), std::move(arrival.packet.requires_grad), pipeline_.specs_.of(arrival.packet.spec)};
  } else {
    gradients_[slot({action.stage - 1, action.kind, action.microbatch})] = std::move(shipments);
  }
  transits_s_[static_cast<size_t>(arrival.id)] = arrival.transit_s;
  execution.complete(arrival.id);
}

Value Pipeline::Step::receive(const Action& action, bool record, Held& held) {
  Message message = std::move(inbox_[slot(action)]);
  const RankDevice& device = device_of(action.stage);
  const bool forced = record && forces_input_grad(action);
  auto& differentiable = pipeline_.differentiable_inputs_[static_cast<size_t>(action.stage)];
  const auto carried = std::find(message.requires_grad.begin(), message.requires_grad.end(), true);
  if (carried != message.requires_grad.end()) differentiable = message.requires_grad;
  const bool known = differentiable.size() == message.tensors.size();
  Value value{{}, std::move(message.spec)};
  held.inputs.resize(message.tensors.size());
  for (size_t i = 0; i < message.tensors.size(); ++i) {
    at::Tensor tensor = device.receive(message.tensors[i]);
    const bool force = forced && can_require_grad(tensor) && (!known || differentiable[i]);
    if (record && (message.requires_grad[i] || force)) {
      tensor = require_input_grad(tensor, held.inputs[i]);
    }
    value.tensors.push_back(std::move(tensor));
  }
  return value;
}

void Pipeline::Step::send_on(const Instruction& instruction, Value value, const std::string& spec, bool carries_grad,
                             Held& held) {
  const Action& action = instruction.action;
  std::vector<bool> flags = keep_outputs(value, carries_grad, held);
  if (!pipeline_.is_local(action.stage + 1)) {
    send_away(instruction, action.stage + 1, {std::move(value.tensors), std::move(flags), spec, {}});
    return;
  }
  Message& message = inbox_[slot({action.stage + 1, action.kind, action.microbatch})];
  message.spec = std::move(value.spec);
  message.requires_grad = std::move(flags);
  for (const at::Tensor& tensor : value.tensors) {
    message.tensors.push_back(device_of(action.stage).send(tensor, device_of(action.stage + 1)));
  }
}

void Pipeline::Step::send_grads(const Instruction& instruction, const Held& held) {
  const Action& action = instruction.action;
  if (action.stage == 0) return;
  if (!pipeline_.is_local(action.stage - 1)) {
    Packet packet;
    for (size_t i = 0; i < held.inputs.size(); ++i) packet.tensors.push_back(held.input_grad(i));
    send_away(instruction, action.stage - 1, packet);
    return;
  }
  auto& below = gradients_[slot({action.stage - 1, action.kind, action.microbatch})];
  for (size_t i = 0; i < held.inputs.size(); ++i) {
    below.push_back(device_of(action.stage).send(held.input_grad(i), device_of(action.stage - 1)));
  }
}

// The receiver waits for a message even where there is nothing to send: it stands for the action's end.
void Pipeline::Step::send_away(const Instruction& instruction, int32_t stage, const Packet& packet) const {
  const auto rank = pipeline_.stage_to_rank_[static_cast<size_t>(stage)];
  pipeline_.transport_->send(pipeline_.peers_[static_cast<size_t>(rank)], instruction.id, packet);
}

}  // namespace timelyfreeze
