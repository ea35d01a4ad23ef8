#pragma once
// The order of work on device queues, apart from any device.
//
// A stream runs what it was given in order, later; `event.record(stream)` marks a point in it, `event.block(stream)`
// makes another stream wait for that point. c10::Stream and c10::Event behave so on CUDA. QueueStream and QueueEvent
// below are their twin on CPU threads: a hand-over that forgets a wait is a data race there, which ThreadSanitizer
// sees.
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <queue>
#include <thread>
#include <utility>

namespace timelyfreeze {

// Runs `enqueue_copy` (which enqueues work on `copy`) after all that `producer` has been given so far. The event
// returned stands for the copy's end: block the consumer's stream on it before it reads.
template <class Event, class Stream, class EnqueueCopy, class MakeEvent>
std::shared_ptr<Event> ship(const Stream& producer, const Stream& copy, MakeEvent&& make_event,
                            EnqueueCopy&& enqueue_copy) {
  Event produced = make_event();
  produced.record(producer);
  produced.block(copy);
  std::forward<EnqueueCopy>(enqueue_copy)();
  auto arrived = std::make_shared<Event>(make_event());
  arrived->record(copy);
  return arrived;
}

// An in-order queue served by a thread of its own.
class QueueStream {
 public:
  QueueStream() : state_(std::make_shared<State>()), thread_([state = state_] { serve(*state); }) {}
  QueueStream(const QueueStream&) = delete;
  QueueStream& operator=(const QueueStream&) = delete;
  ~QueueStream() {
    enqueue(nullptr);
    thread_.join();
  }

  // An empty function ends the queue.
  void enqueue(std::function<void()> work) const {
    {
      const std::lock_guard lock(state_->mutex);
      state_->work.push(std::move(work));
    }
    state_->changed.notify_one();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::queue<std::function<void()>> work;
  };

  static void serve(State& state) {
    for (;;) {
      std::unique_lock lock(state.mutex);
      state.changed.wait(lock, [&] { return !state.work.empty(); });
      const auto work = std::move(state.work.front());
      state.work.pop();
      lock.unlock();
      if (!work) return;
      work();
    }
  }

  std::shared_ptr<State> state_;
  std::thread thread_;
};

class QueueEvent {
 public:
  void record(const QueueStream& stream) {
    auto mark = std::make_shared<Mark>();
    mark_ = mark;
    stream.enqueue([mark] {
      {
        const std::lock_guard lock(mark->mutex);
        mark->reached = true;
      }
      mark->changed.notify_all();
    });
  }
  void block(const QueueStream& stream) const {
    stream.enqueue([mark = mark_] { mark->wait(); });
  }
  void synchronize() const { mark_->wait(); }

 private:
  struct Mark {
    std::mutex mutex;
    std::condition_variable changed;
    bool reached = false;

    void wait() {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return reached; });
    }
  };
  std::shared_ptr<Mark> mark_;
};

}  // namespace timelyfreeze
