#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <limits>
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

  // Keeps `work`, which reads `inputs`; where the rank's cap leaves no room for them, it is done at once.
  void push(std::initializer_list<at::Tensor> inputs, Work work);
  // Does what was kept, in the order in which it came, each letting go of its inputs.
  void run();

 private:
  PendingBytes& pending_;
  std::vector<Work> work_;
  std::unordered_set<const void*> storages_;  // counted: projections that share an input keep it once
  int64_t bytes_ = 0;
};

// Adds a gradient, or the product of two matrices (or batches of them) that is one, to `parameter.grad`. The product
// goes straight into it where it can: one GEMM, no second pass over memory.
void accumulate(const at::Tensor& parameter, const at::Tensor& gradient);
void accumulate_product(const at::Tensor& parameter, const at::Tensor& left, const at::Tensor& right);
// Adds rows of `gradient` to the rows of `parameter.grad` that `indices` name, but for `padding_index`.
void accumulate_rows(const at::Tensor& parameter, const at::Tensor& indices, const at::Tensor& gradient,
                     int64_t padding_index);

}  // namespace timelyfreeze
