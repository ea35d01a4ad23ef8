#include "runtime/device.h"

#include <c10/core/impl/VirtualGuardImpl.h>

#include "runtime/stream.h"

namespace timelyfreeze {

RankDevice::RankDevice(c10::Device device) : device_(device) {
  if (device.is_cpu()) return;
  const c10::impl::VirtualGuardImpl guard(device.type());
  compute_ = guard.getStreamFromGlobalPool(device);
  copy_ = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
}

void RankDevice::follow_caller() const {
  if (!compute_) return;
  c10::Event event(device_.type());
  event.record(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
  event.block(*compute_);
}

void RankDevice::lead_caller() const {
  if (!compute_) return;
  c10::Event event(device_.type());
  event.record(*compute_);
  event.block(c10::impl::VirtualGuardImpl(device_.type()).getStream(device_));
}

void RankDevice::synchronize() const {
  if (compute_) compute_->synchronize();
}

std::optional<c10::Event> RankDevice::mark() const {
  if (!compute_) return std::nullopt;
  c10::Event event(device_.type(), c10::EventFlag::BACKEND_DEFAULT);
  event.record(*compute_);
  return event;
}

Shipment RankDevice::send(const at::Tensor& tensor, const RankDevice& reader) const {
  if (!tensor.defined() || (!compute_ && !reader.compute_)) return {tensor, nullptr};
  if (device_ == reader.device_ || !compute_ || device_.type() != reader.device_.type()) {
    // One device: the reader only has to wait. From or to a CPU: the reader copies when it needs the data.
    std::shared_ptr<c10::Event> produced;
    if (compute_) {
      produced = std::make_shared<c10::Event>(device_.type());
      produced->record(*compute_);
    }
    return {tensor, produced};
  }
  at::Tensor copied;
  const auto make_event = [&] { return c10::Event(device_.type()); };
  auto sent = ship<c10::Event>(*compute_, *copy_, make_event, [&] {
    // A copy between two devices runs on the current streams of both.
    const c10::MultiStreamGuard streams({*copy_, *reader.copy_});
    copied = tensor.to(reader.device_, /*non_blocking=*/true);
  });
  sent->block(*reader.copy_);
  auto arrived = std::make_shared<c10::Event>(device_.type());
  arrived->record(*reader.copy_);
  tensor.record_stream(*copy_);
  copied.record_stream(*reader.compute_);
  return {copied, arrived};
}

at::Tensor RankDevice::receive(const Shipment& shipment) const {
  if (!shipment.tensor.defined()) return shipment.tensor;
  if (shipment.arrived) {
    if (compute_) {
      shipment.arrived->block(*compute_);
    } else {
      shipment.arrived->synchronize();
    }
  }
  if (shipment.tensor.device() == device_) {
    if (compute_) shipment.tensor.record_stream(*compute_);
    return shipment.tensor;
  }
  return shipment.tensor.to(device_, /*non_blocking=*/compute_.has_value());
}

}  // namespace timelyfreeze
