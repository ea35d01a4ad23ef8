#include "runtime/transport.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <deque>
#include <limits>
#include <thread>
#include <unordered_map>

#include "runtime/connections.h"
#include "runtime/layout.h"
#include "runtime/worker_group.h"

namespace timelyfreeze {
namespace {

constexpr int kWordTag = 1;
constexpr int kHeaderTag = 2;
constexpr int kClockTag = 4;
constexpr int kTensorTag = 5;  // and the layout's index: see Incoming::early
// Layouts that two ranks remember of each other; then they begin anew.
constexpr size_t kMaxLayouts = 4096;
constexpr int kClockRounds = 8;
// Messages for which receives are posted before they come. While a processor is busy computing, a send that finds its
// receive posted is written at once; else a thread of the library has to get hold of the processor first, which took
// 2 to 5 ms on 2 busy cores.
constexpr size_t kAhead = 2;
// After so many wrong guesses at a peer's layouts there are no more.
constexpr int kMaxMisses = 16;

struct Word {
  int64_t id;
  int64_t layout;        // index among those that the receiver has seen
  int64_t header_bytes;  // 0: it has seen this one
  int64_t sent_at_ns;    // on rank 0's clock
};
constexpr int64_t kWordLength = sizeof(Word) / sizeof(int64_t);

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

}  // namespace

struct Transport::Impl : Connections {
  // What two ranks have told each other of the packets that one sends the other.
  struct Outgoing {
    std::unordered_map<std::string, int64_t> layouts;
    int64_t next = 0;  // a layout's number never comes again: receives that were posted for it may still wait
  };
  // Receives of a packet's tensors.
  struct Posted {
    std::vector<at::Tensor> tensors;
    std::vector<Work> works;
  };
  struct Incoming {
    std::unordered_map<int64_t, Layout> layouts;
    std::unordered_map<ActionId, int64_t> last;  // the layout that each action's packet had last
    // Receives that were posted on a guess. Each layout has a tag of its own, so a wrong guess waits for the next
    // packet that looks like it.
    std::unordered_map<int64_t, std::deque<Posted>> early;
    int misses = 0;
  };

  Impl(const std::string& control_name, const std::string& up_name, const std::string& down_name, c10::Device on)
      : Connections(control_name, up_name, down_name),
        device(on),
        outgoing(static_cast<size_t>(control->getSize())),
        incoming(outgoing.size()),
        receivers(control->getSize()) {
    if (!device.is_cpu()) arrivals = c10::impl::VirtualGuardImpl(device.type()).getStreamFromGlobalPool(device, true);
  }

  const Layout& receive_layout(const Word& word, int32_t peer) {
    auto& [layouts, last, early, misses] = incoming[static_cast<size_t>(peer)];
    if (word.header_bytes > 0) {
      const at::Tensor header = at::empty({word.header_bytes}, at::kByte);
      receive_small(header, peer, kHeaderTag);
      if (layouts.size() >= kMaxLayouts) {  // the sender has begun anew, too
        layouts.clear();
        last.clear();
      }
      layouts.emplace(word.layout, Layout::from_text(text_of(header, 0, word.header_bytes)));
    }
    return layouts.at(word.layout);
  }

  // A receive of a word, and what was guessed of the packet that it announces; -1: nothing.
  struct Ahead {
    at::Tensor word;
    Work work;
    int64_t guess;
  };

  int64_t word_length() const { return kWordLength + static_cast<int64_t>(num_notes); }

  Ahead post_word(int32_t peer, int64_t guess) {
    at::Tensor word = at::empty({word_length()}, at::kLong);
    Work work = post_receive(control, word, peer, kWordTag);
    return {std::move(word), std::move(work), guess};
  }

  // Guesses only where tensors come over the control group: elsewhere a receive occupies a device until it is matched.
  int64_t guess_layout(int32_t peer, ActionId id) const {
    const Incoming& from = incoming[static_cast<size_t>(peer)];
    const auto known = from.last.find(id);
    return up.get() != control.get() || from.misses > kMaxMisses || known == from.last.end() ? -1 : known->second;
  }

  Posted post_tensors(int32_t peer, int64_t layout) {
    const Group& group = peer < control->getRank() ? up : down;
    Posted posted;
    for (const Layout::Entry& entry : incoming[static_cast<size_t>(peer)].layouts.at(layout).entries) {
      at::Tensor& tensor = posted.tensors.emplace_back();
      if (!entry.defined) continue;
      tensor = make_empty(entry, device);
      if (tensor.numel() > 0)
        posted.works.push_back(post_receive(group, as_row(tensor), peer, kTensorTag + static_cast<int>(layout)));
    }
    return posted;
  }

  Arrival take(int32_t peer, const Ahead& ahead) {
    wait(ahead.work, peer);
    Word word{};
    std::memcpy(&word, ahead.word.const_data_ptr(), sizeof word);
    Incoming& from = incoming[static_cast<size_t>(peer)];
    const Layout& layout = receive_layout(word, peer);
    if (ahead.guess >= 0 && ahead.guess != word.layout) ++from.misses;
    from.last[static_cast<ActionId>(word.id)] = word.layout;
    Arrival arrival;
    arrival.id = static_cast<ActionId>(word.id);
    arrival.packet.spec = layout.spec;
    arrival.packet.notes.resize(num_notes);
    std::memcpy(arrival.packet.notes.data(), ahead.word.const_data_ptr<int64_t>() + kWordLength,
                num_notes * sizeof(double));
    if (layout.has_flags) {
      for (const Layout::Entry& entry : layout.entries) arrival.packet.requires_grad.push_back(entry.requires_grad);
    }
    const c10::OptionalStreamGuard stream(arrivals);
    auto& early = from.early[word.layout];
    Posted posted;
    if (early.empty()) {
      posted = post_tensors(peer, word.layout);
    } else {
      posted = std::move(early.front());
      early.pop_front();
    }
    for (const Work& work : posted.works) wait(work, peer);
    arrival.packet.tensors = std::move(posted.tensors);
    if (arrivals) {
      arrival.arrived = std::make_shared<c10::Event>(device.type());
      arrival.arrived->record(*arrivals);
    }
    arrival.transit_s = now_s() + clock_offset_s - static_cast<double>(word.sent_at_ns) * 1e-9;
    return arrival;
  }

  // Words of the packets to come, and, where it can be guessed, their tensors.
  void look_ahead(int32_t peer, Expected& expected, std::deque<Ahead>& ahead) {
    while (ahead.size() < kAhead) {
      const auto id = expected.at(ahead.size());
      if (!id) return;
      const int64_t guess = guess_layout(peer, *id);
      ahead.push_back(post_word(peer, guess));
      if (guess < 0) continue;
      const auto alike = std::count_if(ahead.begin(), ahead.end(), [&](const Ahead& a) { return a.guess == guess; });
      auto& early = incoming[static_cast<size_t>(peer)].early[guess];
      if (early.size() < static_cast<size_t>(alike)) early.push_back(post_tensors(peer, guess));
    }
  }

  void receive_all(int32_t peer, Expected& expected, const OnArrival& on_arrival) {
    const at::NoGradGuard no_grad;
    std::deque<Ahead> ahead;
    while (expected.wait()) {
      look_ahead(peer, expected, ahead);
      Arrival arrival = take(peer, ahead.front());
      ahead.pop_front();
      if (arrival.id != expected.take()) {
        throw LostRank{peer, "it sent another action's data: the ranks do not run the same program"};
      }
      look_ahead(peer, expected, ahead);
      on_arrival(peer, std::move(arrival));
    }
  }

  const c10::Device device;
  std::optional<c10::Stream> arrivals;  // what is received runs here
  double clock_offset_s = 0.0;
  size_t num_notes = 0;
  std::vector<Outgoing> outgoing;  // a peer
  std::vector<Incoming> incoming;  // a peer
  WorkerGroup receivers;
  std::vector<std::thread> threads;
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
void Transport::carry_notes(size_t count) { impl_->num_notes = count; }

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
  auto& [layouts, next] = impl_->outgoing[static_cast<size_t>(peer)];
  if (layouts.size() >= kMaxLayouts && layouts.count(text) == 0) layouts.clear();
  const auto [known, is_new] = layouts.try_emplace(text, next);
  next += is_new ? 1 : 0;
  const at::Tensor bytes = at::zeros({impl_->word_length()}, at::kLong);
  const Word word{id, known->second, is_new ? static_cast<int64_t>(text.size()) : 0,
                  static_cast<int64_t>((now_s() + impl_->clock_offset_s) * 1e9)};
  std::memcpy(bytes.mutable_data_ptr(), &word, sizeof word);
  std::memcpy(bytes.mutable_data_ptr<int64_t>() + kWordLength, packet.notes.data(),
              std::min(impl_->num_notes, packet.notes.size()) * sizeof(double));
  const Group& group = peer > rank() ? impl_->up : impl_->down;
  // Tensors first where they wait for a stream: the word tells the receiver that they are posted.
  for (const at::Tensor& tensor : ready.tensors) {
    if (tensor.defined() && tensor.numel() > 0)
      impl_->keep(impl_->post_send(group, as_row(tensor), peer, kTensorTag + static_cast<int>(word.layout)), peer);
  }
  impl_->send_small(bytes, peer, kWordTag);
  if (is_new) impl_->send_small(bytes_of(text, word.header_bytes), peer, kHeaderTag);
}

Arrival Transport::receive(int32_t peer) {
  const at::NoGradGuard no_grad;
  return impl_->take(peer, impl_->post_word(peer, -1));
}

void Transport::flush() { impl_->flush(); }
int64_t Transport::num_sent() const { return impl_->num_sent(); }
void Transport::release(int64_t count) { impl_->release(count); }

void Transport::start_receiving(const std::vector<Inbound>& inbound, const OnArrival& on_arrival,
                                const OnError& on_error) {
  while (impl_->threads.size() < inbound.size()) {
    const auto index = static_cast<int32_t>(impl_->threads.size());
    impl_->threads.emplace_back([this, index] { impl_->receivers.work(index); });
  }
  if (inbound.empty()) return;
  const auto receive_all = [this, inbound, on_arrival, on_error](int32_t index) {
    const Inbound& from = inbound[static_cast<size_t>(index)];
    try {
      Expected expected(from.ids);
      impl_->receive_all(from.peer, expected, on_arrival);
    } catch (...) {
      on_error(std::current_exception());
    }
  };
  if (!impl_->receivers.start(receive_all, static_cast<int32_t>(inbound.size()))) throw TransportCancelled();
}

void Transport::receive_from(int32_t peer, Expected& expected, const OnArrival& on_arrival) {
  impl_->receive_all(peer, expected, on_arrival);
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

void Transport::cancel() { impl_->cancel(); }

}  // namespace timelyfreeze
