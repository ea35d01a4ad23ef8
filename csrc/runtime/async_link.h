#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "runtime/expected.h"
#include "runtime/specs.h"
#include "runtime/transport.h"

namespace timelyfreeze {

// What connects a stage with its neighbours where those are other processes: forwards come from below, gradients from
// above, each on a thread of its own, which posts a receive only for micro-batches that this process knows of.
//
// Every packet has notes, numbers that say what the tensors do not. Nothing waits for a receiver: a send is only let go
// of once as many others have followed as there can be micro-batches on their way.
class AsyncLink {
 public:
  // The transport's numbers of the neighbours; none below the first stage and above the last.
  struct Peers {
    std::optional<int32_t> below;
    std::optional<int32_t> above;
  };
  using OnPacket = std::function<void(Arrival arrival)>;
  using OnError = std::function<void(std::exception_ptr error)>;

  AsyncLink(std::shared_ptr<Transport> transport, Peers peers, std::shared_ptr<SpecCache> specs);
  ~AsyncLink();
  AsyncLink(const AsyncLink&) = delete;
  AsyncLink& operator=(const AsyncLink&) = delete;

  [[nodiscard]] PyRef spec_of(const std::string& text) { return specs_->of(text); }

  // The callbacks run on the receiving threads, and have to outlive `stop`.
  void start(const OnPacket& on_forward, const OnPacket& on_grads, const OnError& on_error);
  // Micro-batches that will come, by their places in their batches, the same on all ranks.
  void expect(const std::vector<ActionId>& places);
  void send_forward(ActionId place, const Packet& packet) { send(*peers_.above, place, packet); }
  void send_grads(ActionId place, const Packet& packet) { send(*peers_.below, place, packet); }
  // Waits until all that was sent has been received.
  void flush() { transport_->release(sent_.empty() ? 0 : sent_.back()); }
  // There are no more micro-batches; the threads end with the last one.
  void end();
  // Ends all waiting here and in the transport, which is of no more use.
  void cancel();
  // Waits for the threads, after `end` or `cancel`.
  void stop();

 private:
  void send(int32_t peer, ActionId place, const Packet& packet);

  const std::shared_ptr<Transport> transport_;
  const Peers peers_;
  const std::shared_ptr<SpecCache> specs_;
  const size_t most_on_their_way_;
  Expected forwards_;
  Expected grads_;
  std::deque<int64_t> sent_;  // how many sends the transport had after each of the last packets
  std::vector<std::thread> threads_;
};

}  // namespace timelyfreeze
