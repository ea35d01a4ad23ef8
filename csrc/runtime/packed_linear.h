#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace timelyfreeze {

// Linear layers of one input as one matrix product, their outputs behind each other: y = x [w_1; w_2; ...]^T + [b_i].
//
// One product where the weights lie behind each other in memory, else one each, straight into its columns. Frozen,
// backward is the same for the input gradient, and the input is not kept. Trained weights' gradients go straight into
// `.grad` (one GEMM with beta = 1), or wait for W in a stage whose backward is split; a weight that has hooks is left
// to autograd.
at::Tensor packed_linear(const at::Tensor& input, const std::vector<at::Tensor>& weights,
                         const std::vector<std::optional<at::Tensor>>& biases);

// Rows of `weight` by index; its gradient likewise.
at::Tensor fused_embedding(const at::Tensor& indices, const at::Tensor& weight, int64_t padding_index);

}  // namespace timelyfreeze
