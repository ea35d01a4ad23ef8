#include "ops/product.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mm.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

namespace at::native {

// result = a @ b + beta result, by oneDNN. Exported by torch, in no header; null in a torch that has it not.
#ifdef __GNUC__
__attribute__((weak))
#endif
void mkldnn_matmul(const Tensor& a, const Tensor& b, const Tensor& result, float beta, float alpha);

}  // namespace at::native

namespace timelyfreeze {
namespace {

constexpr int64_t kFewestMultiplications = 1 << 21;  // below, what a call costs is not made up for
constexpr int64_t kFewestInner = 128;                // with fewer, the writing takes the time

bool outdoes_mkl() {
#if defined(__x86_64__) && defined(__GNUC__)
  static const bool does =
      at::native::mkldnn_matmul != nullptr && __builtin_cpu_is("amd") && __builtin_cpu_supports("avx512f");
  return does;
#else
  return false;
#endif
}

bool by_onednn(const at::Tensor& tensor, const at::Tensor& other, int64_t rows, int64_t inner, int64_t cols) {
  return inner >= kFewestInner && rows * inner * cols >= kFewestMultiplications && outdoes_mkl() && tensor.is_cpu() &&
         other.is_cpu() && tensor.scalar_type() == at::kFloat && other.scalar_type() == at::kFloat &&
         at::globalContext().userEnabledMkldnn() && !c10::impl::TorchDispatchModeTLS::any_modes_set();
}

bool by_onednn(const at::Tensor& a, const at::Tensor& b) {
  return a.dim() == 2 && b.dim() == 2 && a.size(1) == b.size(0) && by_onednn(a, b, a.size(0), a.size(1), b.size(1));
}

void multiply(const at::Tensor& result, const at::Tensor& a, const at::Tensor& b, float beta) {
  RECORD_FUNCTION("timelyfreeze::product", std::vector<c10::IValue>());
  at::internal::lazy_init_num_threads();  // else OpenMP's own number holds in a thread that torch has not been in
  at::native::mkldnn_matmul(a, b, result, beta, /*alpha=*/1.0F);
}

}  // namespace

at::Tensor as_rows(const at::Tensor& tensor) { return tensor.reshape({-1, tensor.size(-1)}); }

at::Tensor fast_linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  const bool fits = input.dim() > 0 && weight.dim() == 2 && weight.size(1) > 0 && input.size(-1) == weight.size(1);
  if (!fits || !by_onednn(input, weight, input.numel() / weight.size(1), weight.size(1), weight.size(0))) {
    return at::linear(input, weight, bias);
  }
  const at::Tensor rows = as_rows(input);
  at::Tensor output = at::empty({rows.size(0), weight.size(0)}, rows.options());
  const bool has_bias = bias && bias->defined();
  if (has_bias) output.copy_(bias->expand_as(output));
  multiply(output, rows, weight.t(), has_bias ? 1.0F : 0.0F);
  auto sizes = input.sizes().vec();
  sizes.back() = weight.size(0);
  return output.view(sizes);
}

at::Tensor fast_product(const at::Tensor& a, const at::Tensor& b) {
  if (!by_onednn(a, b)) return a.matmul(b);
  at::Tensor result = at::empty({a.size(0), b.size(1)}, a.options());
  multiply(result, a, b, 0.0F);
  return result;
}

void fast_product_into(at::Tensor& result, const at::Tensor& a, const at::Tensor& b) {
  if (result.scalar_type() == a.scalar_type() && by_onednn(a, b)) {
    multiply(result, a, b, 0.0F);
  } else {
    at::mm_out(result, a, b);
  }
}

void add_fast_product(at::Tensor& result, const at::Tensor& a, const at::Tensor& b) {
  if (result.scalar_type() == a.scalar_type() && by_onednn(a, b)) {
    multiply(result, a, b, 1.0F);
    result.unsafeGetTensorImpl()->bump_version();  // as any in-place operation does
  } else {
    result.addmm_(a, b);
  }
}

}  // namespace timelyfreeze
