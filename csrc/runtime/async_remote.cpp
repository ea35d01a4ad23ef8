// What an asynchronous stream's stage gets from and sends to other processes.
#include <ATen/ops/scalar_tensor.h>

#include <algorithm>
#include <stdexcept>
#include <utility>

#include "runtime/async_stream.h"

namespace timelyfreeze {
namespace {

// Notes of a packet, a forward's or a gradient's; the norms' follow.
enum Note : size_t { kWeight, kEndsBatch, kLoss, kLossType, kHasCount, kCount, kNumNotes };

std::vector<double> notes_of(double weight, const NormBoard& norms) {
  std::vector<double> notes(AsyncStream::num_notes(norms));
  notes[kWeight] = weight;
  norms.write(notes.data() + kNumNotes);
  return notes;
}

std::vector<double> norms_of(const Packet& packet) { return {packet.notes.begin() + kNumNotes, packet.notes.end()}; }

}  // namespace

size_t AsyncStream::num_notes(const NormBoard& norms) { return kNumNotes + norms.num_notes(); }

void AsyncStream::start_receiving() {
  link_->start([this](Arrival arrival) { arrive_forward(std::move(arrival)); },
               [this](Arrival arrival) { arrive_grads(std::move(arrival)); },
               [this](std::exception_ptr error) { fail_receiving(std::move(error)); });
}

void AsyncStream::stop_receiving() {
  if (!link_) return;
  if (failed()) link_->cancel();
  link_->stop();
}

int32_t AsyncStream::own_stage() const {
  const auto own = std::find_if(stages_.begin(), stages_.end(), [](const auto& stage) { return stage != nullptr; });
  return static_cast<int32_t>(own - stages_.begin());
}

void AsyncStream::fail_receiving(std::exception_ptr error) {
  bool is_news = cancel_.cancel(std::nullopt, error);
  try {
    std::rethrow_exception(error);
  } catch (const TransportCancelled&) {
    is_news = false;  // somebody else has said why
  } catch (...) {
  }
  if (is_news && on_failure) on_failure();
  fail(error);  // wakes everybody
}

void AsyncStream::arrive_forward(Arrival arrival) {
  StageRun& run = runs_[static_cast<size_t>(own_stage())];
  const int64_t m = run.num_forwards.load(std::memory_order_relaxed);
  Packet& packet = arrival.packet;
  {
    const std::lock_guard lock(mutex_);
    // All that the stage has not taken yet is still in the queue, and so is this one.
    const AsyncTicket& ticket = inputs_[inputs_.size() - static_cast<size_t>(num_pushed_ - m)].ticket;
    if (packet.notes[kWeight] != ticket.weight || (packet.notes[kEndsBatch] != 0.0) != ticket.ends_batch) {
      throw std::runtime_error("the batches differ: expected the same batches on all ranks, got " +
                               std::to_string(static_cast<int64_t>(packet.notes[kWeight])) +
                               " samples in micro-batch " + std::to_string(ticket.place) +
                               " from the stage below and " + std::to_string(static_cast<int64_t>(ticket.weight)) +
                               " here. Give every rank's run() the same batches.");
    }
  }
  Message& message = run.inbox[static_cast<size_t>(m) % run.inbox.size()];
  for (at::Tensor& tensor : packet.tensors) message.tensors.push_back({std::move(tensor), arrival.arrived});
  message.requires_grad = std::move(packet.requires_grad);
  message.spec = link_->spec_of(packet.spec);
  message.norms = norms_of(packet);
  run.num_forwards.store(m + 1, std::memory_order_release);
  ring(own_stage());
}

void AsyncStream::arrive_grads(Arrival arrival) {
  StageRun& run = runs_[static_cast<size_t>(own_stage())];
  const int64_t m = run.num_gradients.load(std::memory_order_relaxed);
  const std::vector<double>& notes = arrival.packet.notes;
  Gradients& gradients = run.gradients[static_cast<size_t>(m) % run.gradients.size()];
  for (at::Tensor& tensor : arrival.packet.tensors) gradients.tensors.push_back({std::move(tensor), arrival.arrived});
  gradients.weight = notes[kWeight];
  gradients.loss.tensor = at::scalar_tensor(notes[kLoss], static_cast<at::ScalarType>(notes[kLossType]));
  if (notes[kHasCount] != 0.0) gradients.loss.count = notes[kCount];
  gradients.norms = norms_of(arrival.packet);
  add_loss(gradients.loss);
  run.num_gradients.store(m + 1, std::memory_order_release);
  ring(own_stage());
}

void AsyncStream::send_forward_away(Value value, const std::string& spec, std::vector<bool> flags,
                                    const AsyncTicket& ticket) {
  Packet packet{std::move(value.tensors), std::move(flags), spec, notes_of(ticket.weight, *norms_)};
  packet.notes[kEndsBatch] = ticket.ends_batch ? 1.0 : 0.0;
  link_->send_forward(ticket.place, packet);
}

void AsyncStream::send_grads_away(const Slot& own, double weight) {
  Packet packet{{}, {}, {}, notes_of(weight, *norms_)};
  for (size_t i = 0; i < own.held.inputs.size(); ++i) packet.tensors.push_back(own.held.input_grad(i));
  packet.notes[kLoss] = own.loss.tensor.item<double>();
  packet.notes[kLossType] = static_cast<double>(own.loss.tensor.scalar_type());
  packet.notes[kHasCount] = own.loss.count ? 1.0 : 0.0;
  packet.notes[kCount] = own.loss.count.value_or(0.0);
  link_->send_grads(own.ticket.place, packet);
}

}  // namespace timelyfreeze
