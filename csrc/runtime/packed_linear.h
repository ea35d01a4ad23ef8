#pragma once
#include <ATen/core/Tensor.h>

#include <optional>
#include <vector>

namespace timelyfreeze {

// Linear layers of one input as one matrix product, their outputs behind each other: for x [n, in], dy [n, out],
//
//   y = x [w_1; w_2; ...]^T + [b_1, b_2, ...]
//   dx = dy [w_1; w_2; ...],   dw_i = dy_i^T x,   db_i = sum over n of dy_i      (Goodfellow et al., Deep
//   Learning, 6.5)
//
// FLOPs: 2 n in out each of y, dx and dw. Bytes: y reads n in + in out and writes n out; dx reads n out + in out and
// writes n in; dw reads n (in + out), and reads and writes in out: into `.grad` (a GEMM with beta = 1), with no array
// between. What is kept for backward: the input, where a weight trains; frozen, nothing but the weights themselves.
//
// One product where the weights lie behind each other in memory, else one each, straight into its columns. Trained
// weights' gradients go straight into `.grad`, or wait for W in a stage whose backward is split; a weight that has
// hooks is left to autograd. `transposed`: weights are stored [in, out], as GPT-2's are.
at::Tensor packed_linear(const at::Tensor& input, const std::vector<at::Tensor>& weights,
                         const std::vector<std::optional<at::Tensor>>& biases, bool transposed = false);

// Rows of `weight` by index; its gradient likewise.
at::Tensor fused_embedding(const at::Tensor& indices, const at::Tensor& weight, int64_t padding_index);

}  // namespace timelyfreeze
