#pragma once
// Runs CUDA kernels on the CPU as CUDA defines them, not as any GPU times them: blocks one after another, each CUDA
// thread a fiber that runs until it has to wait. Threads take their turns in ascending or descending order: what
// depends on the order, as where a barrier is missing, differs between the two.
#include <vector_types.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "kernels/simt/fiber.h"

namespace timelyfreeze::simt {

enum class Order : uint8_t { ascending, descending };

class Machine {
 public:
  static constexpr unsigned kLanes = 32;

  static Machine& instance() {
    static auto* machine = new Machine;  // never destroyed, so that no leak is reported
    return *machine;
  }

  Order order = Order::ascending;
  dim3 grid_dim, block_dim;
  uint3 block_index{};

  [[nodiscard]] const uint3& thread_index() const { return current_->index; }

  void run(dim3 grid, dim3 block, std::function<void()> kernel) {
    grid_dim = grid;
    block_dim = block;
    kernel_ = std::move(kernel);
    if (block.x * block.y * block.z > 1024) fail("more than 1024 threads");
    for (block_index.z = 0; block_index.z < grid.z; ++block_index.z) {
      for (block_index.y = 0; block_index.y < grid.y; ++block_index.y) {
        for (block_index.x = 0; block_index.x < grid.x; ++block_index.x) run_block();
      }
    }
  }

  void barrier() {
    ++num_at_barrier_;
    wait(State::at_barrier);
  }

  // Every lane of `mask` hands over a value and gets the one of lane `source`, when all of them have come.
  template <typename T>
  T exchange(unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) <= sizeof(uint64_t));
    Thread& self = *current_;
    Warp& warp = warps_[self.number / kLanes];
    const unsigned lane = self.number % kLanes;
    if ((mask >> lane & 1) == 0) fail("a lane shuffles that its mask leaves out");
    // Two rows of slots take turns: no lane is more than one exchange ahead.
    uint64_t* slots = warp.slots[self.num_exchanges++ % 2];
    std::memcpy(&slots[lane], &value, sizeof(T));
    warp.arrived |= 1u << lane;
    if ((warp.arrived & mask) == mask) {
      warp.arrived &= ~mask;
      for (unsigned other = 0; other < kLanes; ++other) {
        if (other != lane && (mask >> other & 1) != 0) thread(self.number - lane + other).state = State::ready;
      }
    } else {
      wait(State::at_shuffle);
    }
    if ((mask >> source & 1) == 0) fail("a shuffle reads a lane that its mask leaves out");
    T result;
    std::memcpy(&result, &slots[source], sizeof(T));
    return result;
  }

 private:
  enum class State : uint8_t { ready, at_barrier, at_shuffle, done };
  struct Thread {
    uint3 index{};
    unsigned number = 0;
    State state = State::ready;
    unsigned num_exchanges = 0;
    Fiber* fiber = nullptr;
  };
  struct Warp {
    unsigned arrived = 0;
    uint64_t slots[2][kLanes] = {};
  };

  [[noreturn]] void fail(const char* what) const {
    std::fprintf(stderr, "simt: %s in block (%u, %u, %u)\n", what, block_index.x, block_index.y, block_index.z);
    std::abort();
  }

  Thread& thread(unsigned number) { return threads_[number]; }
  Thread& in_order(size_t i) { return threads_[order == Order::ascending ? i : threads_.size() - 1 - i]; }

  void run_block() {
    const unsigned num_threads = block_dim.x * block_dim.y * block_dim.z;
    threads_.assign(num_threads, Thread{});
    warps_.assign((num_threads + kLanes - 1) / kLanes, Warp{});
    for (unsigned i = 0; i < num_threads; ++i) {
      thread(i).number = i;
      thread(i).index = {i % block_dim.x, i / block_dim.x % block_dim.y, i / (block_dim.x * block_dim.y)};
    }
    num_begun_ = 0;
    num_at_barrier_ = 0;
    num_live_ = num_threads;
    while (num_live_ > 0) {
      bool moved = false;
      // Comes back when a thread waits, or when all have begun.
      for (; num_begun_ < num_threads; moved = true) main_.switch_to(idle_fiber());
      for (unsigned begin = 0; begin < num_threads; begin += kLanes) moved = run_warp(begin) || moved;
      if (num_live_ > 0 && num_at_barrier_ == num_live_) {
        for (Thread& waiting : threads_) {
          if (waiting.state == State::at_barrier) waiting.state = State::ready;
        }
        num_at_barrier_ = 0;
        moved = true;
      }
      if (!moved) fail("deadlock: not all threads come to a barrier or a shuffle");
    }
  }

  // Runs kLanes threads until all of them wait for others, so that a warp gets as far ahead of the next as it can.
  // Returns whether any of them ran.
  bool run_warp(size_t begin) {
    bool moved = false;
    for (bool again = true; again; moved = moved || again) {
      again = false;
      for (size_t i = begin; i < std::min(begin + kLanes, threads_.size()); ++i) {
        if (in_order(i).state != State::ready) continue;
        current_ = &in_order(i);
        main_.switch_to(*current_->fiber);
        again = true;
      }
    }
    return moved;
  }

  // A fiber begins one thread after another: a kernel whose threads never wait needs but one.
  static void run_threads() {
    Machine& machine = instance();
    Fiber::begin(machine.main_);
    Fiber* self = machine.starting_;
    for (;;) {
      while (machine.num_begun_ < machine.threads_.size()) {
        Thread& next = machine.in_order(machine.num_begun_++);
        next.fiber = self;
        machine.current_ = &next;
        machine.kernel_();
        next.state = State::done;
        --machine.num_live_;
      }
      machine.idle_.push_back(self);
      self->switch_to(machine.main_);
    }
  }

  Fiber& idle_fiber() {
    if (idle_.empty()) {
      starting_ = new Fiber(&run_threads);
      return *starting_;
    }
    Fiber* fiber = idle_.back();
    idle_.pop_back();
    return *fiber;
  }

  void wait(State state) {
    current_->state = state;
    current_->fiber->switch_to(main_);  // who switches back has made this thread the current one again
  }

  std::function<void()> kernel_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::vector<Fiber*> idle_;
  Fiber main_;
  Fiber* starting_ = nullptr;
  Thread* current_ = nullptr;
  size_t num_begun_ = 0;
  unsigned num_live_ = 0;
  unsigned num_at_barrier_ = 0;
};

inline void run(dim3 grid, dim3 block, std::function<void()> kernel) {
  Machine::instance().run(grid, block, std::move(kernel));
}

}  // namespace timelyfreeze::simt
