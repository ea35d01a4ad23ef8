#pragma once
#include <torch/csrc/autograd/variable.h>

#include <optional>
#include <tuple>

namespace timelyfreeze::ops {

// Operators that return an input beside what they compute, or views of one piece of memory, which the dispatcher's
// schemas cannot say: Python calls these directly. The others are torch.ops.timelyfreeze's.

// RMSNorm (or, `centered`, LayerNorm) of x + residual -> {y} or {y, h}: h = x + residual where there is a residual, or
// x itself where it `passes_on`, so that the gradient of the residual stream is added in the same pass.
torch::autograd::variable_list norm(const at::Tensor& x, const std::optional<at::Tensor>& residual,
                                    const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias,
                                    double eps, bool centered, bool passes_on);

// Packed [batch, length, (heads + 2 kv_heads) width] -> q and k turned, and v: [batch, heads, length, width], in one
// piece of memory of their own.
std::tuple<at::Tensor, at::Tensor, at::Tensor> rope_qkv(const at::Tensor& qkv, const at::Tensor& cosines,
                                                        const at::Tensor& sines, int64_t num_heads,
                                                        int64_t num_kv_heads, int64_t offset);

}  // namespace timelyfreeze::ops
