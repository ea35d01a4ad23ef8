#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
#include <mutex>
#include <unordered_set>
#include <vector>

namespace timelyfreeze {

// What the weight gradients that wait on one rank keep from being freed.
struct PendingBytes {
  int64_t now = 0;
  int64_t peak = 0;
  int64_t cap = std::numeric_limits<int64_t>::max();
};

// The weight gradients of one micro-batch in one stage that wait for their action W. One action at a time uses it.
class WeightQueue {
 public:
  using Work = std::function<void()>;

  explicit WeightQueue(PendingBytes& pending) : pending_(pending) {}
  WeightQueue(const WeightQueue&) = delete;
  WeightQueue& operator=(const WeightQueue&) = delete;

  // While it lives, in I, the queue keeps what is pushed. User code may call backward() in a forward, too, or on a
  // graph that it has kept beyond the step: there gradients are wanted at once.
  class Open {
   public:
    explicit Open(WeightQueue& queue) : queue_(queue) { queue_.is_open_ = true; }
    ~Open() { queue_.is_open_ = false; }
    Open(const Open&) = delete;
    Open& operator=(const Open&) = delete;

   private:
    WeightQueue& queue_;
  };

  // Keeps `work`, which reads `inputs`; it is done at once where the queue is not open or the rank's cap leaves no
  // room.
  void push(std::initializer_list<at::Tensor> inputs, Work work);
  // Does what was kept, in the order in which it came, each letting go of its inputs. Throws c10::Error where one of
  // these was written in place since: then its values are lost.
  void run();

 private:
  // Whether the cap leaves room; then it is taken.
  bool reserve(std::initializer_list<at::Tensor> inputs);

  struct Waiting {
    Work work;
    std::vector<at::Tensor> inputs;
    std::vector<int64_t> versions;
  };

  PendingBytes& pending_;
  bool is_open_ = false;
  std::mutex mutex_;  // one backward runs on a thread a device
  std::vector<Waiting> waiting_;
  std::unordered_set<const void*> storages_;  // counted: projections that share an input keep it once
  int64_t bytes_ = 0;
};

// Adds a gradient, or the product of two matrices (or batches of them) that is one, to `parameter.grad`. The product
// goes straight into it where it can: one GEMM, no second pass over memory.
void accumulate(const at::Tensor& parameter, const at::Tensor& gradient);
void accumulate_product(const at::Tensor& parameter, const at::Tensor& left, const at::Tensor& right);
// The same of two matrices, as ops/product.h multiplies: not to the last bit as autograd does.
void accumulate_fast_product(const at::Tensor& parameter, const at::Tensor& left, const at::Tensor& right);
// Adds rows of `gradient` to the rows of `parameter.grad` that `indices` name, but for `padding_index`.
void accumulate_rows(const at::Tensor& parameter, const at::Tensor& indices, const at::Tensor& gradient,
                     int64_t padding_index);

}  // namespace timelyfreeze
