#pragma once
#include <ATen/core/Tensor.h>

#include <optional>

namespace timelyfreeze {

// Matrix products below autograd, by whichever of torch's two libraries is sooner done. Large ones of float32 on AMD
// processors with AVX-512 are oneDNN's, which has kernels for it; MKL, torch's choice, takes AVX2 there and half the
// rate. All others, and all where torch.backends.mkldnn is off or a TorchDispatchMode looks on, are torch's choice.

// input [..., in] @ weight [out, in]^T + bias [out]
at::Tensor fast_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias);

// a [m, k] @ b [k, n]: a new matrix; written into `result` [m, n]; added to it.
at::Tensor fast_product(const at::Tensor& a, const at::Tensor& b);
void fast_product_into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b);
void add_fast_product(at::Tensor& result, const at::Tensor& a, const at::Tensor& b);

// [..., n] as a matrix.
at::Tensor as_rows(const at::Tensor& tensor);

}  // namespace timelyfreeze
