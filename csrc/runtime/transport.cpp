#include "runtime/transport.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <array>
#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <unordered_map>
#include <unordered_set>

#include "runtime/layout.h"
#include "runtime/worker_group.h"

namespace timelyfreeze {
namespace {

using Work = c10::intrusive_ptr<c10d::Work>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

constexpr int kWordTag = 1;
constexpr int kHeaderTag = 2;
constexpr int kTensorTag = 3;
constexpr int kTextTag = 4;
constexpr int kClockTag = 5;
// A text of up to this length goes in one message, a longer one in two.
constexpr int64_t kFrameBytes = 4096;
// Layouts that two ranks remember of each other; then they begin anew.
constexpr size_t kMaxLayouts = 4096;
constexpr int kClockRounds = 8;

struct Word {
  int64_t id;
  int64_t layout;        // index among those that the receiver has seen
  int64_t header_bytes;  // 0: it has seen this one
  int64_t sent_at_ns;    // on rank 0's clock
};
constexpr int64_t kWordLength = sizeof(Word) / sizeof(int64_t);

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

at::Tensor bytes_of(const std::string& text, int64_t length) {
  at::Tensor bytes = at::empty({length}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

std::string text_of(const at::Tensor& bytes, int64_t begin, int64_t length) {
  return {reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()) + begin, static_cast<size_t>(length)};
}

}  // namespace

struct Transport::Impl {
  // What two ranks have told each other of the packets that one sends the other.
  struct Outgoing {
    std::unordered_map<std::string, int64_t> layouts;
  };
  struct Incoming {
    std::vector<Layout> layouts;
  };

  Impl(const std::string& control_name, const std::string& up_name, const std::string& down_name, c10::Device on)
      : control(c10d::resolve_process_group(control_name)),
        up(c10d::resolve_process_group(up_name)),
        down(c10d::resolve_process_group(down_name)),
        device(on),
        outgoing(static_cast<size_t>(control->getSize())),
        incoming(outgoing.size()),
        receivers(control->getSize()) {
    if (!device.is_cpu()) arrivals = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
  }

  Work post_send(const Group& group, const at::Tensor& tensor, int32_t peer, int tag) {
    return guarded(peer, [&] {
      std::vector<at::Tensor> tensors{tensor};
      return group->send(tensors, peer, tag);
    });
  }

  Work post_receive(const Group& group, const at::Tensor& tensor, int32_t peer, int tag) {
    return guarded(peer, [&] {
      std::vector<at::Tensor> tensors{tensor};
      return group->recv(tensors, peer, tag);
    });
  }

  // What breaks inside is the connection to the peer, whatever the library calls it.
  template <typename Function>
  auto guarded(int32_t peer, const Function& function) -> decltype(function()) {
    if (is_cancelled()) throw TransportCancelled();
    try {
      return function();
    } catch (const c10::Error& error) {
      throw_lost(peer, error.what_without_backtrace());
    } catch (const std::exception& error) {
      throw_lost(peer, error.what());
    }
  }

  [[noreturn]] void throw_lost(int32_t peer, const char* text) {
    if (is_cancelled()) throw TransportCancelled();
    throw LostRank{peer, text};
  }

  // On an accelerator the current stream waits, otherwise the thread.
  void wait(const Work& work, int32_t peer) {
    {
      const std::lock_guard lock(mutex);
      if (cancelled) throw TransportCancelled();
      waited_for.insert(work.get());
    }
    bool done = false;
    std::exception_ptr error;
    try {
      done = guarded(peer, [&] { return work->wait(); });
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex);
      waited_for.erase(work.get());
    }
    if (error) std::rethrow_exception(error);
    if (!done) throw_lost(peer, "the connection was given up");
  }

  bool is_cancelled() {
    const std::lock_guard lock(mutex);
    return cancelled;
  }

  void send_small(const at::Tensor& tensor, int32_t peer, int tag) {
    keep(post_send(control, tensor, peer, tag), peer);
  }

  void receive_small(const at::Tensor& tensor, int32_t peer, int tag) {
    wait(post_receive(control, tensor, peer, tag), peer);
  }

  // Until `flush`: a send that is forgotten would be taken back.
  void keep(Work work, int32_t peer) {
    const std::lock_guard lock(mutex);
    sent.emplace_back(std::move(work), peer);
  }

  void send_text(const std::string& text, int32_t peer) {
    const auto size = static_cast<int64_t>(text.size());
    std::string frame(reinterpret_cast<const char*>(&size), sizeof size);
    const auto room = static_cast<size_t>(kFrameBytes) - frame.size();
    frame += text.substr(0, room);
    send_small(bytes_of(frame, kFrameBytes), peer, kTextTag);
    if (text.size() > room) send_small(bytes_of(text.substr(room), size - static_cast<int64_t>(room)), peer, kTextTag);
  }

  std::string receive_text(int32_t peer) {
    const at::Tensor frame = at::empty({kFrameBytes}, at::kByte);
    receive_small(frame, peer, kTextTag);
    int64_t size = 0;
    std::memcpy(&size, frame.const_data_ptr(), sizeof size);
    constexpr auto kHead = static_cast<int64_t>(sizeof size);
    std::string text = text_of(frame, kHead, std::min(size, kFrameBytes - kHead));
    const int64_t rest = size - static_cast<int64_t>(text.size());
    if (rest > 0) {
      const at::Tensor bytes = at::empty({rest}, at::kByte);
      receive_small(bytes, peer, kTextTag);
      text += text_of(bytes, 0, rest);
    }
    return text;
  }

  const Layout& receive_layout(const Word& word, int32_t peer) {
    auto& layouts = incoming[static_cast<size_t>(peer)].layouts;
    if (word.header_bytes > 0) {
      const at::Tensor header = at::empty({word.header_bytes}, at::kByte);
      receive_small(header, peer, kHeaderTag);
      if (word.layout == 0) layouts.clear();
      layouts.push_back(Layout::from_text(text_of(header, 0, word.header_bytes)));
    }
    return layouts.at(static_cast<size_t>(word.layout));
  }

  const Group control;
  const Group up;
  const Group down;
  const c10::Device device;
  std::optional<c10::Stream> arrivals;  // what is received runs here
  double clock_offset_s = 0.0;
  std::vector<Outgoing> outgoing;  // a peer
  std::vector<Incoming> incoming;  // a peer
  WorkerGroup receivers;
  std::vector<std::thread> threads;

  std::mutex mutex;
  bool cancelled = false;
  std::unordered_set<c10d::Work*> waited_for;
  std::vector<std::pair<Work, int32_t>> sent;
};

Transport::Transport(const std::string& control, const std::string& up, const std::string& down, c10::Device device)
    : impl_(std::make_unique<Impl>(control, up, down, device)) {}

Transport::~Transport() {
  cancel();
  impl_->receivers.close();
  for (std::thread& thread : impl_->threads) thread.join();
}

int32_t Transport::rank() const { return impl_->control->getRank(); }
int32_t Transport::size() const { return impl_->control->getSize(); }
double Transport::clock_offset_s() const { return impl_->clock_offset_s; }

// Rank 0 answers each rank in turn with its own time, which lies between question and answer; the quickest answer says
// it best.
void Transport::set_clock() {
  const at::Tensor time = at::empty({1}, at::kDouble);
  if (rank() == 0) {
    for (int32_t peer = 1; peer < size(); ++peer) {
      for (int round = 0; round < kClockRounds; ++round) {
        impl_->receive_small(time, peer, kClockTag);
        time.fill_(now_s());
        impl_->wait(impl_->post_send(impl_->control, time, peer, kClockTag), peer);
      }
    }
    return;
  }
  double best_s = std::numeric_limits<double>::infinity();
  for (int round = 0; round < kClockRounds; ++round) {
    const double asked_s = now_s();
    impl_->send_small(at::zeros({1}, at::kDouble), 0, kClockTag);
    impl_->receive_small(time, 0, kClockTag);
    const double answered_s = now_s();
    if (answered_s - asked_s >= best_s) continue;
    best_s = answered_s - asked_s;
    impl_->clock_offset_s = time.item<double>() - (asked_s + answered_s) / 2;
  }
  flush();
}

void Transport::send(int32_t peer, ActionId id, const Packet& packet) {
  const at::NoGradGuard no_grad;
  Packet ready = packet;
  const std::string text = lay_out(ready).to_text();
  auto& layouts = impl_->outgoing[static_cast<size_t>(peer)].layouts;
  if (layouts.size() >= kMaxLayouts) layouts.clear();
  const auto [known, is_new] = layouts.try_emplace(text, static_cast<int64_t>(layouts.size()));
  const at::Tensor bytes = at::empty({kWordLength}, at::kLong);
  const Word word{id, known->second, is_new ? static_cast<int64_t>(text.size()) : 0,
                  static_cast<int64_t>((now_s() + impl_->clock_offset_s) * 1e9)};
  std::memcpy(bytes.mutable_data_ptr(), &word, sizeof word);
  const Group& group = peer > rank() ? impl_->up : impl_->down;
  // Tensors first where they wait for a stream: the word tells the receiver that they are posted.
  for (const at::Tensor& tensor : ready.tensors) {
    if (tensor.defined() && tensor.numel() > 0)
      impl_->keep(impl_->post_send(group, as_row(tensor), peer, kTensorTag), peer);
  }
  impl_->send_small(bytes, peer, kWordTag);
  if (is_new) impl_->send_small(bytes_of(text, word.header_bytes), peer, kHeaderTag);
}

Arrival Transport::receive(int32_t peer) {
  const at::NoGradGuard no_grad;
  const at::Tensor bytes = at::empty({kWordLength}, at::kLong);
  impl_->receive_small(bytes, peer, kWordTag);
  Word word{};
  std::memcpy(&word, bytes.const_data_ptr(), sizeof word);
  const Layout& layout = impl_->receive_layout(word, peer);
  Arrival arrival;
  arrival.id = static_cast<ActionId>(word.id);
  arrival.packet.spec = layout.spec;
  const Group& group = peer < rank() ? impl_->up : impl_->down;
  const c10::OptionalStreamGuard stream(impl_->arrivals);
  std::vector<Work> works;
  for (const Layout::Entry& entry : layout.entries) {
    if (layout.has_flags) arrival.packet.requires_grad.push_back(entry.requires_grad);
    at::Tensor& tensor = arrival.packet.tensors.emplace_back();
    if (!entry.defined) continue;
    tensor = make_empty(entry, impl_->device);
    if (tensor.numel() > 0) works.push_back(impl_->post_receive(group, as_row(tensor), peer, kTensorTag));
  }
  for (const Work& work : works) impl_->wait(work, peer);
  if (impl_->arrivals) {
    arrival.arrived = std::make_shared<c10::Event>(impl_->device.type());
    arrival.arrived->record(*impl_->arrivals);
  }
  arrival.transit_s = now_s() + impl_->clock_offset_s - static_cast<double>(word.sent_at_ns) * 1e-9;
  return arrival;
}

void Transport::flush() {
  for (;;) {
    std::vector<std::pair<Work, int32_t>> sent;
    {
      const std::lock_guard lock(impl_->mutex);
      sent.swap(impl_->sent);
    }
    if (sent.empty()) return;
    for (const auto& [work, peer] : sent) impl_->wait(work, peer);
  }
}

void Transport::start_receiving(const std::vector<Inbound>& inbound, const OnArrival& on_arrival,
                                const OnError& on_error) {
  while (impl_->threads.size() < inbound.size()) {
    const auto index = static_cast<int32_t>(impl_->threads.size());
    impl_->threads.emplace_back([this, index] { impl_->receivers.work(index); });
  }
  if (inbound.empty()) return;
  const auto receive_all = [this, inbound, on_arrival, on_error](int32_t index) {
    const Inbound& own = inbound[static_cast<size_t>(index)];
    try {
      for (size_t i = 0; i < own.ids.size(); ++i) {
        Arrival arrival = receive(own.peer);
        if (arrival.id != own.ids[i]) {
          throw LostRank{own.peer, "it sent another action's data: the ranks do not run the same program"};
        }
        on_arrival(own.peer, std::move(arrival));
      }
    } catch (...) {
      on_error(std::current_exception());
    }
  };
  if (!impl_->receivers.start(receive_all, static_cast<int32_t>(inbound.size()))) throw TransportCancelled();
}

void Transport::finish_receiving() {
  while (!impl_->receivers.wait_idle_for(std::chrono::seconds(1))) {
  }
}

// By way of rank 0.
std::vector<std::string> Transport::exchange(const std::string& own) {
  std::vector<std::string> all(static_cast<size_t>(size()));
  const auto length = [](const std::string& text) { return static_cast<int64_t>(text.size()); };
  if (rank() == 0) {
    all[0] = own;
    for (int32_t peer = 1; peer < size(); ++peer) all[static_cast<size_t>(peer)] = impl_->receive_text(peer);
    std::string packed;
    for (const std::string& text : all) {
      const int64_t size = length(text);
      packed.append(reinterpret_cast<const char*>(&size), sizeof size);
      packed += text;
    }
    for (int32_t peer = 1; peer < size(); ++peer) impl_->send_text(packed, peer);
    flush();
    return all;
  }
  impl_->send_text(own, 0);
  const std::string packed = impl_->receive_text(0);
  size_t position = 0;
  for (std::string& text : all) {
    int64_t size = 0;
    std::memcpy(&size, packed.data() + position, sizeof size);
    position += sizeof size;
    text = packed.substr(position, static_cast<size_t>(size));
    position += static_cast<size_t>(size);
  }
  flush();
  return all;
}

void Transport::cancel() {
  std::vector<std::pair<Work, int32_t>> sent;
  const std::lock_guard lock(impl_->mutex);
  impl_->cancelled = true;
  for (c10d::Work* work : impl_->waited_for) work->abort();
}

}  // namespace timelyfreeze
