#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <unordered_set>
#include <utility>
#include <vector>

#include "runtime/transport.h"

namespace timelyfreeze {

using Work = c10::intrusive_ptr<c10d::Work>;
using Group = c10::intrusive_ptr<c10d::ProcessGroup>;

// A text of up to this length goes in one message, a longer one in two.
constexpr int64_t kFrameBytes = 4096;
constexpr int kTextTag = 3;

inline at::Tensor bytes_of(const std::string& text, int64_t length) {
  at::Tensor bytes = at::empty({length}, at::kByte);
  std::memcpy(bytes.mutable_data_ptr(), text.data(), text.size());
  return bytes;
}

inline std::string text_of(const at::Tensor& bytes, int64_t begin, int64_t length) {
  return {reinterpret_cast<const char*>(bytes.const_data_ptr<uint8_t>()) + begin, static_cast<size_t>(length)};
}

// Sends and receives of torch.distributed that can be given up: what waits here ends when `cancel` is called.
class Connections {
 public:
  Connections(const std::string& control_name, const std::string& up_name, const std::string& down_name)
      : control(c10d::resolve_process_group(control_name)),
        up(c10d::resolve_process_group(up_name)),
        down(c10d::resolve_process_group(down_name)) {}

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

  // From now on nothing waits any more.
  void cancel() {
    const std::lock_guard lock(mutex_);
    cancelled_ = true;
    for (c10d::Work* work : waited_for_) work->abort();
  }

  // Waits until all that was sent has been received.
  void flush() { release(num_sent()); }

  // How many sends were kept so far.
  int64_t num_sent() {
    const std::lock_guard lock(mutex_);
    return num_released_ + static_cast<int64_t>(sent_.size());
  }

  // Waits until the first `count` of them have been received, and lets go of those.
  void release(int64_t count) {
    for (;;) {
      std::pair<Work, int32_t> oldest;
      {
        const std::lock_guard lock(mutex_);
        if (sent_.empty() || num_released_ >= count) return;
        oldest = std::move(sent_.front());
        sent_.pop_front();
        ++num_released_;
      }
      wait(oldest.first, oldest.second);
    }
  }

  // On an accelerator the current stream waits, otherwise the thread.
  void wait(const Work& work, int32_t peer) {
    {
      const std::lock_guard lock(mutex_);
      if (cancelled_) throw TransportCancelled();
      waited_for_.insert(work.get());
    }
    bool done = false;
    std::exception_ptr error;
    try {
      done = guarded(peer, [&] { return work->wait(); });
    } catch (...) {
      error = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      waited_for_.erase(work.get());
    }
    if (error) std::rethrow_exception(error);
    if (!done) throw_lost(peer, "the connection was given up");
  }

  void send_small(const at::Tensor& tensor, int32_t peer, int tag) {
    keep(post_send(control, tensor, peer, tag), peer);
  }

  void receive_small(const at::Tensor& tensor, int32_t peer, int tag) {
    wait(post_receive(control, tensor, peer, tag), peer);
  }

  // Until it is released: a send that is forgotten would be taken back.
  void keep(Work work, int32_t peer) {
    const std::lock_guard lock(mutex_);
    sent_.emplace_back(std::move(work), peer);
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

  const Group control;
  const Group up;
  const Group down;

 private:
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

  bool is_cancelled() {
    const std::lock_guard lock(mutex_);
    return cancelled_;
  }

  std::mutex mutex_;
  bool cancelled_ = false;
  std::unordered_set<c10d::Work*> waited_for_;
  std::deque<std::pair<Work, int32_t>> sent_;
  int64_t num_released_ = 0;
};

}  // namespace timelyfreeze
