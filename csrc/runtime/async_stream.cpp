// The order of an asynchronous stream, and what its stages wait for. What they do is in async_actions.cpp.
#include "runtime/async_stream.h"

#include <ATen/autocast_mode.h>

#include <algorithm>

namespace timelyfreeze {

AsyncStream::AsyncStream(const std::vector<std::shared_ptr<Stage>>& stages, const std::vector<RankDevice>& devices,
                         const AsyncCalls& calls, const AsyncOptions& options, AsyncLedger& ledger,
                         int64_t first_microbatch, bool timed, NormBoard* norms, std::unique_ptr<AsyncLink> link)
    : stages_(stages),
      devices_(devices),
      calls_(calls),
      options_(options),
      ledger_(ledger),
      norms_(norms),
      first_microbatch_(first_microbatch),
      runs_(stages.size()),
      times_(devices, timed),
      link_(std::move(link)) {
  for (int32_t s = 0; s < num_stages(); ++s) {
    StageRun& run = runs_[static_cast<size_t>(s)];
    const auto size = static_cast<size_t>(most_outstanding(s));
    run.slots.resize(size);
    run.gradients.resize(size);
    // The stage below has one more outstanding, and sends no more before a backward of one that was taken from here.
    run.inbox.resize(size + 1);
  }
  if (link_) start_receiving();
}

void AsyncStream::work(int32_t stage) {
  AsyncPlace now{stage, 'F', 0};
  try {
    const at::ThreadLocalStateGuard caller(caller_);  // autocast, modes and hooks of the thread that called run()
    at::autocast::set_autocast_cache_enabled(false);  // it would give out casts of weights from before their update
    run_order(stage, now);
    if (link_ && !cancel_.cancelled()) link_->flush();
  } catch (const TransportCancelled&) {
    fail(std::current_exception());  // somebody else has said why
  } catch (...) {
    if (cancel_.cancel(std::nullopt, std::current_exception())) {
      {
        const std::lock_guard lock(mutex_);
        failed_at_ = AsyncPlace{stage, now.kind, first_microbatch_ + now.microbatch};
      }
      if (on_failure) on_failure();
    }
    for (int32_t s = 0; s < num_stages(); ++s) ring(s);
  }
  {
    const std::lock_guard lock(mutex_);
    ++num_over_;
  }
  news_.notify_all();
}

void AsyncStream::begin(AsyncPlace& now, char kind, int64_t m) {
  now.kind = kind;
  now.microbatch = m;
  if (link_) running_.store((static_cast<int64_t>(kind) << 48) | (first_microbatch_ + m), std::memory_order_relaxed);
}

std::optional<AsyncPlace> AsyncStream::running() const {
  const int64_t packed = running_.load(std::memory_order_relaxed);
  if (packed == 0) return std::nullopt;
  return AsyncPlace{own_stage(), static_cast<char>(packed >> 48), packed & ((int64_t{1} << 48) - 1)};
}

void AsyncStream::run_order(int32_t stage, AsyncPlace& now) {
  int64_t num_forwards = 0;
  for (int64_t num_backwards = 0;;) {
    if (num_forwards - num_backwards < most_outstanding(stage)) {
      const Coming coming = wait_for_input(stage, num_forwards);
      if (coming == Coming::cancelled) return;
      if (coming == Coming::here) {
        begin(now, 'F', num_forwards);
        times_.time(stage, 'F', first_microbatch_ + num_forwards, [&] { forward(stage, num_forwards); });
        ++num_forwards;
        continue;
      }
      if (num_backwards == num_forwards) break;
    }
    if (!wait_for_gradients(stage, num_backwards)) return;
    begin(now, 'B', num_backwards);
    const bool ends_batch = slot(stage, num_backwards).ticket.ends_batch;
    times_.time(stage, 'B', first_microbatch_ + num_backwards,
                [&] { backward(stage, num_backwards, num_forwards - num_backwards > 1); });
    begin(now, 'U', num_backwards);
    StageRun& run = runs_[static_cast<size_t>(stage)];
    if (run.window.size == options_.accumulation) {
      times_.time(stage, 'U', first_microbatch_ + num_backwards,
                  [&] { update(stage, num_backwards, num_forwards - num_backwards - 1); });
    }
    const auto& batch_end = calls_.batch_ends[static_cast<size_t>(stage)];
    if (ends_batch && !batch_end.is_none()) {
      const pybind11::gil_scoped_acquire gil;
      batch_end();
    }
    ++num_backwards;
  }
  begin(now, 'U', std::max<int64_t>(num_forwards - 1, 0));
  if (runs_[static_cast<size_t>(stage)].window.size > 0) update(stage, now.microbatch, 0);
  running_ = 0;
}

AsyncStream::Slot& AsyncStream::slot(int32_t stage, int64_t m) {
  return runs_[static_cast<size_t>(stage)].slots[static_cast<size_t>(m % most_outstanding(stage))];
}

void AsyncStream::ring(int32_t stage) {
  std::atomic<uint32_t>& rings = runs_[static_cast<size_t>(stage)].rings;
  rings.fetch_add(1, std::memory_order_release);
  rings.notify_one();
}

AsyncStream::Coming AsyncStream::wait_for_input(int32_t stage, int64_t m) {
  StageRun& run = runs_[static_cast<size_t>(stage)];
  running_.store(0, std::memory_order_relaxed);
  for (bool told = false;;) {
    const uint32_t seen = run.rings.load(std::memory_order_acquire);
    if (cancel_.cancelled()) return Coming::cancelled;
    if (run.num_forwards.load(std::memory_order_acquire) > m) return Coming::here;
    if (end_.load(std::memory_order_acquire) == m) return Coming::never;
    if (!told) {
      told = true;
      run.settled_at.store(m, std::memory_order_release);
      tell();
    }
    run.rings.wait(seen, std::memory_order_acquire);
  }
}

bool AsyncStream::wait_for_gradients(int32_t stage, int64_t m) {
  if (is_last(stage)) return !cancel_.cancelled();
  running_.store(0, std::memory_order_relaxed);
  StageRun& run = runs_[static_cast<size_t>(stage)];
  for (;;) {
    const uint32_t seen = run.rings.load(std::memory_order_acquire);
    if (cancel_.cancelled()) return false;
    if (run.num_gradients.load(std::memory_order_acquire) > m) return true;
    run.rings.wait(seen, std::memory_order_acquire);
  }
}

void AsyncStream::push(std::vector<AsyncInput> inputs) {
  std::vector<ActionId> places;
  {
    const std::lock_guard lock(mutex_);
    num_pushed_ += static_cast<int64_t>(inputs.size());
    for (AsyncInput& input : inputs) {
      places.push_back(input.ticket.place);
      inputs_.push_back(std::move(input));
    }
    runs_[0].num_forwards.store(num_pushed_, std::memory_order_release);
  }
  if (link_) link_->expect(places);
  ring(0);
}

void AsyncStream::end() {
  {
    const std::lock_guard lock(mutex_);
    end_.store(num_pushed_, std::memory_order_release);
  }
  if (link_) link_->end();
  for (int32_t s = 0; s < num_stages(); ++s) ring(s);
}

void AsyncStream::fail(std::exception_ptr error) {
  cancel_.cancel(std::nullopt, std::move(error));
  if (link_) link_->cancel();
  for (int32_t s = 0; s < num_stages(); ++s) ring(s);
  tell();
}

std::pair<std::optional<AsyncPlace>, std::exception_ptr> AsyncStream::failure() const {
  const std::lock_guard lock(mutex_);
  return {failed_at_, cancel_.failure().error};
}

std::vector<AsyncLoss> AsyncStream::take_losses(int64_t count) {
  const std::lock_guard lock(mutex_);
  std::vector<AsyncLoss> taken;
  for (; count > 0 && !losses_.empty(); --count) {
    taken.push_back(std::move(losses_.front()));
    losses_.pop_front();
  }
  return taken;
}

void AsyncStream::skip_losses(int64_t count) {
  const std::lock_guard lock(mutex_);
  for (; count > 0 && !losses_.empty(); --count) losses_.pop_front();
  num_skipped_losses_ += count;
}

bool AsyncStream::has_reached(Goal goal, int64_t num_losses) const {
  if (goal == Goal::over) return num_over_ == (link_ ? 1 : num_stages());
  if (cancel_.cancelled()) return true;
  if (goal == Goal::losses) return static_cast<int64_t>(losses_.size()) >= num_losses;
  for (int32_t s = 0; s < num_stages(); ++s) {
    const StageRun& run = runs_[static_cast<size_t>(s)];
    if (is_local(s) && run.settled_at.load(std::memory_order_acquire) != num_pushed_) return false;
  }
  return true;
}

bool AsyncStream::wait(Goal goal, int64_t num_losses, std::chrono::milliseconds timeout) {
  std::unique_lock lock(mutex_);
  return news_.wait_for(lock, timeout, [&] { return has_reached(goal, num_losses); });
}

// The lock is taken so that nobody looks before the change and sleeps after the call.
void AsyncStream::tell() {
  {
    const std::lock_guard lock(mutex_);
  }
  news_.notify_all();
}

}  // namespace timelyfreeze
