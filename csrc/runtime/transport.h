#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/program.h"
#include "runtime/expected.h"

namespace timelyfreeze {

// The connection to another rank broke.
struct LostRank {
  int32_t rank;
  std::string text;
};

// Waiting for other ranks was given up, since the step was cancelled.
struct TransportCancelled {};

// What one rank sends another for an action.
struct Packet {
  std::vector<at::Tensor> tensors;  // undefined: there is none, and nothing travels
  std::vector<bool> requires_grad;  // one a tensor, or none
  std::string spec;                 // says how the tensors are put together; empty: it is the one tensor itself
  std::vector<double> notes;        // as many as `carry_notes` says; others are cut off or 0
};

struct Arrival {
  ActionId id = 0;
  Packet packet;
  std::shared_ptr<c10::Event> arrived;  // on an accelerator the tensors are there once this is
  double transit_s = 0.0;               // from the sender's call to the last byte, on rank 0's clock
};

// Which tensors a rank receives, in the order in which `peer` sends them.
struct Inbound {
  int32_t peer;
  std::vector<ActionId> ids;
};

// Messages between this process and the other ranks, over the sends and receives of torch.distributed.
//
// From one rank to another, messages arrive in the order in which they are sent. Each begins with a word of fixed size
// on the control group; shapes, dtypes, strides and the spec follow it only where the receiver has not seen them yet.
// Every peer has a thread that receives: it posts a receive for tensors only when their word is there, that is when the
// sender has posted them, so that no receive occupies a device for long; and since receiving never waits for
// computing, no order of sends can lock two ranks up.
class Transport {
 public:
  // The names of process groups with the same ranks. `control` takes CPU tensors; tensors travel on `up` to higher and
  // on `down` to lower ranks. Where sends occupy a stream until they are received (NCCL) these must be two groups, or
  // two ranks that send to each other wait for ever.
  Transport(const std::string& control, const std::string& up, const std::string& down, c10::Device device);
  ~Transport();
  Transport(const Transport&) = delete;
  Transport& operator=(const Transport&) = delete;

  [[nodiscard]] int32_t rank() const;
  [[nodiscard]] int32_t size() const;

  // Everything below that blocks throws LostRank, or TransportCancelled after `cancel`.

  // From now on every packet has so many notes. All ranks call it, before the first packet.
  void carry_notes(size_t count);

  // Finds out by how much this rank's clock differs from rank 0's. All ranks call it together.
  void set_clock();
  // Seconds to add to this rank's steady clock to get rank 0's.
  [[nodiscard]] double clock_offset_s() const;

  // Does not wait for the receiver.
  void send(int32_t peer, ActionId id, const Packet& packet);
  Arrival receive(int32_t peer);
  // Waits until all that was sent has been taken off this rank's hands.
  void flush();
  // The same of the first `count` sends of all; there have been `num_sent`.
  [[nodiscard]] int64_t num_sent() const;
  void release(int64_t count);

  using OnArrival = std::function<void(int32_t peer, Arrival arrival)>;
  using OnError = std::function<void(std::exception_ptr error)>;
  // Receives in the background; the callbacks run on the receiving threads. `on_error` may come once a peer.
  void start_receiving(const std::vector<Inbound>& inbound, const OnArrival& on_arrival, const OnError& on_error);
  // Returns once nothing is being received any more.
  void finish_receiving();
  // Receives on the calling thread, until no more is expected. Not while the peer's packets are received otherwise.
  void receive_from(int32_t peer, Expected& expected, const OnArrival& on_arrival);

  // Every rank's text to every rank. All ranks call it together.
  std::vector<std::string> exchange(const std::string& own);

  // Ends all waiting, now and later: the transport is of no more use. From any thread.
  void cancel();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace timelyfreeze
