#pragma once
#include <torch/csrc/autograd/saved_variable.h>

#include <memory>
#include <optional>
#include <vector>

#include "runtime/node.h"
#include "runtime/weight_queue.h"

namespace timelyfreeze {

// [..., n] as a matrix of rows of n.
inline at::Tensor as_rows(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

// The leaf whose gradient is wanted; `transposed` where an operator was given its transposition.
struct Parameter {
  at::Tensor tensor;
  bool transposed = false;
};

// The graph's node of an operator whose weight gradient may wait. Its outputs are the gradients of input, weight and
// bias; those that wait are left undefined, so that autograd has nothing to accumulate.
class DeferredNode : public torch::autograd::Node {
 public:
  // Without a queue the work is done at once, in backward.
  explicit DeferredNode(std::shared_ptr<WeightQueue> queue) : queue_(std::move(queue)) {}

 protected:
  // Whether the gradient of output `index` can go to its leaf's `.grad` past autograd. Not where it is asked for by
  // torch.autograd.grad, shall be differentiated again, or where hooks, of whatever age, wait for it on the way.
  [[nodiscard]] bool accumulates(size_t index) const;
  void leave(std::initializer_list<at::Tensor> inputs, WeightQueue::Work work) const;

 private:
  const std::shared_ptr<WeightQueue> queue_;
};

class DeferredProduct : public DeferredNode {
 public:
  // `bias_leaf` is undefined where the bias gradient does not wait.
  DeferredProduct(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                  bool is_linear, Parameter parameter, at::Tensor bias_leaf, std::shared_ptr<WeightQueue> queue);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;

 private:
  void defer(const at::Tensor& input, const at::Tensor& grad, const at::Tensor& bias);

  torch::autograd::SavedVariable input_;
  torch::autograd::SavedVariable weight_;
  const bool is_linear_;
  const Parameter parameter_;
  const at::Tensor bias_leaf_;
  std::vector<int64_t> bias_sizes_;
};

struct ConvolutionShape {
  std::vector<int64_t> stride;
  std::vector<int64_t> padding;
  std::vector<int64_t> dilation;
  std::vector<int64_t> output_padding;
  int64_t groups = 1;
  bool transposed = false;
};

class DeferredConvolution : public DeferredNode {
 public:
  DeferredConvolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                      ConvolutionShape shape, at::Tensor parameter, std::shared_ptr<WeightQueue> queue);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;

 private:
  torch::autograd::SavedVariable input_;
  torch::autograd::SavedVariable weight_;
  const ConvolutionShape shape_;
  const at::Tensor parameter_;
  std::vector<int64_t> bias_sizes_;
};

class DeferredEmbedding : public DeferredNode {
 public:
  DeferredEmbedding(const at::Tensor& weight, const at::Tensor& indices, int64_t padding_index,
                    std::shared_ptr<WeightQueue> queue);
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override;
  void release_variables() override;

 private:
  torch::autograd::SavedVariable indices_;
  const at::Tensor parameter_;
  const int64_t padding_index_;
};

}  // namespace timelyfreeze
