#include "runtime/async_link.h"

#include <utility>

namespace timelyfreeze {

AsyncLink::AsyncLink(std::shared_ptr<Transport> transport, Peers peers, std::shared_ptr<SpecCache> specs)
    : transport_(std::move(transport)),
      peers_(peers),
      specs_(std::move(specs)),
      // Both ways at most one a stage.
      most_on_their_way_(2 * static_cast<size_t>(transport_->size()) + 2) {}

AsyncLink::~AsyncLink() {
  if (threads_.empty()) return;
  cancel();
  stop();
}

void AsyncLink::start(const OnPacket& on_forward, const OnPacket& on_grads, const OnError& on_error) {
  const auto receive = [this, on_error](int32_t peer, Expected& expected, const OnPacket& on_packet) {
    threads_.emplace_back([this, peer, &expected, on_packet, on_error] {
      try {
        transport_->receive_from(peer, expected, [&](int32_t, Arrival arrival) { on_packet(std::move(arrival)); });
      } catch (...) {
        on_error(std::current_exception());
      }
    });
  };
  if (peers_.below) receive(*peers_.below, forwards_, on_forward);
  if (peers_.above) receive(*peers_.above, grads_, on_grads);
}

void AsyncLink::expect(const std::vector<ActionId>& places) {
  if (peers_.below) forwards_.add(places);
  if (peers_.above) grads_.add(places);
}

void AsyncLink::send(int32_t peer, ActionId place, const Packet& packet) {
  transport_->send(peer, place, packet);
  sent_.push_back(transport_->num_sent());
  if (sent_.size() <= most_on_their_way_) return;
  transport_->release(sent_.front());
  sent_.pop_front();
}

void AsyncLink::end() {
  forwards_.end();
  grads_.end();
}

void AsyncLink::cancel() {
  transport_->cancel();
  end();
}

void AsyncLink::stop() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

}  // namespace timelyfreeze
