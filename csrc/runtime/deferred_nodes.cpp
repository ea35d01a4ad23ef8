#include "runtime/deferred_nodes.h"

#include <ATen/ExpandUtils.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/graph_task.h>

#include <array>
#include <tuple>
#include <utility>

namespace timelyfreeze {

using torch::autograd::collect_next_edges;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

namespace {

// Batches of matrices stay what they are.
at::Tensor as_matrix(const at::Tensor& tensor, bool batched) { return batched ? tensor : as_rows(tensor); }

std::vector<int64_t> sizes_of(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() ? tensor->sizes().vec() : std::vector<int64_t>();
}

// Whether a hook sees what goes from `node` to the leaf at the end.
bool is_watched(Node* node) {
  for (;; node = node->next_edge(0).function.get()) {
    if (!node->pre_hooks().empty() || !node->post_hooks().empty() || !node->tensor_pre_hooks().empty() ||
        !node->retains_grad_hooks().empty() || node->tensor_post_acc_grad_hooks() != nullptr) {
      return true;
    }
    if (node->num_outputs() == 0) return false;
  }
}

}  // namespace

bool DeferredNode::accumulates(size_t index) const {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return !at::GradMode::is_enabled() && (wanted == nullptr || wanted->empty()) &&
         !is_watched(next_edge(index).function.get());
}

void DeferredNode::leave(std::initializer_list<at::Tensor> inputs, WeightQueue::Work work) const {
  if (queue_ != nullptr) {
    queue_->push(inputs, std::move(work));
  } else {
    work();
  }
}

DeferredProduct::DeferredProduct(const at::Tensor& input, const at::Tensor& weight,
                                 const std::optional<at::Tensor>& bias, bool is_linear, Parameter parameter,
                                 at::Tensor bias_leaf, std::shared_ptr<WeightQueue> queue)
    : DeferredNode(std::move(queue)),
      input_(input, /*is_output=*/false),
      is_linear_(is_linear),
      parameter_(std::move(parameter)),
      bias_leaf_(std::move(bias_leaf)),
      bias_sizes_(sizes_of(bias)) {
  if (input.requires_grad()) weight_ = SavedVariable(weight, /*is_output=*/false);
  set_next_edges(collect_next_edges(input, weight, bias.value_or(at::Tensor())));
}

variable_list DeferredProduct::apply(variable_list&& grads) {
  const at::Tensor grad = std::move(grads[0]);
  variable_list result(3);
  if (!grad.defined()) return result;
  if (task_should_compute_output(0)) {
    const at::Tensor weight = weight_.unpack();
    result[0] = grad.matmul(is_linear_ ? weight : weight.transpose(-2, -1));
  }
  const bool waits = task_should_compute_output(1) && accumulates(1);
  const bool bias_waits = waits && bias_leaf_.defined() && accumulates(2);
  if (task_should_compute_output(1)) {
    const at::Tensor input = input_.unpack();
    if (waits) {
      defer(input.detach(), grad, bias_waits ? bias_leaf_ : at::Tensor());
    } else {
      const bool batched = parameter_.tensor.dim() == 3;
      const at::Tensor x = as_matrix(input, batched);
      const at::Tensor g = as_matrix(grad, batched);
      result[1] = is_linear_ ? g.t().matmul(x) : x.transpose(-2, -1).matmul(g);
    }
  }
  if (!bias_waits && task_should_compute_output(2)) result[2] = at::sum_to(grad, bias_sizes_);
  return result;
}

void DeferredProduct::defer(const at::Tensor& input, const at::Tensor& grad, const at::Tensor& bias) {
  leave({input, grad}, [parameter = parameter_, bias, is_linear = is_linear_, input, grad] {
    const bool batched = parameter.tensor.dim() == 3;
    const at::Tensor x = as_matrix(input, batched);
    const at::Tensor g = as_matrix(grad, batched);
    if (is_linear != parameter.transposed) {
      accumulate_product(parameter.tensor, g.t(), x);
    } else {
      accumulate_product(parameter.tensor, x.transpose(-2, -1), g);
    }
    if (bias.defined()) accumulate(bias, at::sum_to(g, bias.sizes()));
  });
}

void DeferredProduct::release_variables() {
  input_.reset_data();
  weight_.reset_data();
}

DeferredConvolution::DeferredConvolution(const at::Tensor& input, const at::Tensor& weight,
                                         const std::optional<at::Tensor>& bias, ConvolutionShape shape,
                                         at::Tensor parameter, std::shared_ptr<WeightQueue> queue)
    : DeferredNode(std::move(queue)),
      input_(input, /*is_output=*/false),
      weight_(weight, /*is_output=*/false),
      shape_(std::move(shape)),
      parameter_(std::move(parameter)),
      bias_sizes_(sizes_of(bias)) {
  set_next_edges(collect_next_edges(input, weight, bias.value_or(at::Tensor())));
}

variable_list DeferredConvolution::apply(variable_list&& grads) {
  const at::Tensor grad = std::move(grads[0]);
  variable_list result(3);
  if (!grad.defined()) return result;
  const at::Tensor input = input_.unpack();
  const at::Tensor weight = weight_.unpack();
  const auto backward = [shape = shape_, bias_sizes = bias_sizes_](const auto& g, const auto& x, const auto& w,
                                                                   std::array<bool, 3> wanted) {
    const at::OptionalIntArrayRef sizes =
        bias_sizes.empty() ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(bias_sizes);
    return at::convolution_backward(g, x, w, sizes, shape.stride, shape.padding, shape.dilation, shape.transposed,
                                    shape.output_padding, shape.groups, wanted);
  };
  const bool waits = task_should_compute_output(1) && accumulates(1);
  std::tie(result[0], result[1], result[2]) =
      backward(grad, input, weight,
               {task_should_compute_output(0), !waits && task_should_compute_output(1),
                !bias_sizes_.empty() && task_should_compute_output(2)});
  if (waits) {
    result[1] = at::Tensor();  // some backends give it though it is not wanted
    const at::Tensor x = input.detach();
    leave({x, grad}, [backward, parameter = parameter_, x, w = weight.detach(), grad] {
      accumulate(parameter, std::get<1>(backward(grad, x, w, {false, true, false})));
    });
  }
  return result;
}

void DeferredConvolution::release_variables() {
  input_.reset_data();
  weight_.reset_data();
}

DeferredEmbedding::DeferredEmbedding(const at::Tensor& weight, const at::Tensor& indices, int64_t padding_index,
                                     std::shared_ptr<WeightQueue> queue)
    : DeferredNode(std::move(queue)),
      indices_(indices, /*is_output=*/false),
      parameter_(weight),
      padding_index_(padding_index) {
  set_next_edges(collect_next_edges(weight));
}

variable_list DeferredEmbedding::apply(variable_list&& grads) {
  const at::Tensor grad = std::move(grads[0]);
  if (!grad.defined() || !task_should_compute_output(0)) return variable_list(1);
  const at::Tensor indices = indices_.unpack();
  if (!accumulates(0)) {
    return {at::embedding_dense_backward(grad, indices, parameter_.size(0), padding_index_, /*scale=*/false)};
  }
  leave({indices, grad}, [parameter = parameter_, indices, grad, padding_index = padding_index_] {
    accumulate_rows(parameter, indices, grad, padding_index);
  });
  return variable_list(1);
}

void DeferredEmbedding::release_variables() { indices_.reset_data(); }

}  // namespace timelyfreeze
