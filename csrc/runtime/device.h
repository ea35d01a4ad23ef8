#pragma once
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Event.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>

namespace timelyfreeze {

// A tensor on its way between two ranks; on an accelerator it is there once `arrived` is.
struct Shipment {
  at::Tensor tensor;
  std::shared_ptr<c10::Event> arrived;
};

// Where a rank computes. On an accelerator it has a compute stream and a copy stream; on a CPU work is done in place
// and none of this costs anything.
class RankDevice {
 public:
  explicit RankDevice(c10::Device device);

  [[nodiscard]] c10::Device device() const { return device_; }
  [[nodiscard]] bool is_accelerator() const { return compute_.has_value(); }
  [[nodiscard]] std::optional<c10::Stream> compute_stream() const { return compute_; }

  // The caller's stream and the compute stream wait for each other at the ends of a step.
  void follow_caller() const;
  void lead_caller() const;
  void synchronize() const;
  [[nodiscard]] std::optional<c10::Event> mark() const;  // a timing event on the compute stream

  // Sender's half: makes `tensor`, produced on this rank's compute stream, available to `reader`.
  [[nodiscard]] Shipment send(const at::Tensor& tensor, const RankDevice& reader) const;
  // Reader's half: the compute stream waits for the data, the host does not.
  [[nodiscard]] at::Tensor receive(const Shipment& shipment) const;

 private:
  c10::Device device_;
  std::optional<c10::Stream> compute_;
  std::optional<c10::Stream> copy_;
};

}  // namespace timelyfreeze
