// SiLU, GELU and the gated activations on packed inputs; formulas and bytes in kernels/activation.h.
#include "kernels/activation.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/silu.h>
#include <torch/library.h>

#include "ops/checks.h"
#include "ops/differentiable.h"
#include "ops/fused.h"
#include "ops/stream.h"

namespace timelyfreeze::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;

kernels::Activation parse(const std::string& name) {
  if (name == "silu") return kernels::Activation::silu;
  if (name == "gelu") return kernels::Activation::gelu;
  if (name == "gelu_tanh") return kernels::Activation::gelu_tanh;
  TORCH_CHECK_VALUE(false, "activation: expected silu, gelu or gelu_tanh, got '", name, "'.");
}

kernels::ActivationShape shape_of(const at::Tensor& x, const std::string& name, bool gated) {
  kernels::ActivationShape shape;
  shape.activation = parse(name);
  shape.gated = gated;
  shape.dtype = dtype_of(x, name.c_str());
  if (!gated) {
    shape.rows = 1;
    shape.cols = x.numel();
    return shape;
  }
  TORCH_CHECK_VALUE(x.dim() > 0 && x.size(-1) % 2 == 0, "a gated ", name,
                    ": expected gate and up behind each other in the last dimension, an even size, got shape ",
                    x.sizes(), ".");
  shape.cols = x.size(-1) / 2;
  shape.rows = shape.cols == 0 ? 0 : x.numel() / x.size(-1);
  return shape;
}

at::Tensor activation_forward(const at::Tensor& x_in, const std::string& name, bool gated) {
  const at::Tensor x = x_in.contiguous();
  const auto shape = shape_of(x, name, gated);
  auto sizes = x.sizes().vec();
  if (gated) sizes.back() /= 2;
  at::Tensor y = at::empty(sizes, x.options());
  if (y.numel() == 0) return y;
  if (x.is_cpu()) {
    kernels::activation_forward_cpu(shape, x.const_data_ptr(), y.mutable_data_ptr());
  } else {
    const CudaLaunch launch(x);
    kernels::activation_forward_cuda(shape, x.const_data_ptr(), y.mutable_data_ptr(), launch.stream());
    launch.check();
  }
  return y;
}

at::Tensor activation_backward(const at::Tensor& dy_in, const at::Tensor& x_in, const std::string& name, bool gated) {
  const at::Tensor dy = dy_in.contiguous();
  const at::Tensor x = x_in.contiguous();
  const auto shape = shape_of(x, name, gated);
  at::Tensor dx = at::empty_like(x);
  if (dx.numel() == 0) return dx;
  if (x.is_cpu()) {
    kernels::activation_backward_cpu(shape, x.const_data_ptr(), dy.const_data_ptr(), dx.mutable_data_ptr());
  } else {
    const CudaLaunch launch(x);
    kernels::activation_backward_cuda(shape, x.const_data_ptr(), dy.const_data_ptr(), dx.mutable_data_ptr(),
                                      launch.stream());
    launch.check();
  }
  return dx;
}

at::Tensor plain_activation(const at::Tensor& x, const std::string& name) {
  if (name == "silu") return at::silu(x);
  return at::gelu(x, name == "gelu" ? "none" : "tanh");
}

variable_list plain_formula(const variable_list& inputs, const std::string& name, bool gated) {
  if (!gated) return {plain_activation(inputs[0], name)};
  const auto halves = inputs[0].chunk(2, -1);
  return {plain_activation(halves[0], name) * halves[1]};
}

struct FusedActivation : Function<FusedActivation> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const std::string& name, bool gated) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op = find_operator<decltype(activation_forward)>("timelyfreeze::activation");
    ctx->saved_data["name"] = name;
    ctx->saved_data["gated"] = gated;
    ctx->save_for_backward({x});
    return op.call(x, name, gated);
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const std::string name = ctx->saved_data["name"].toStringRef();
    const bool gated = ctx->saved_data["gated"].toBool();
    const at::Tensor x = ctx->get_saved_variables()[0];
    if (at::GradMode::is_enabled()) {
      const auto formula = [&](const variable_list& inputs) { return plain_formula(inputs, name, gated); };
      return {differentiable_gradients(formula, {x}, grads)[0], at::Tensor(), at::Tensor()};
    }
    static const auto op = find_operator<decltype(activation_backward)>("timelyfreeze::activation_backward");
    return {op.call(grads[0], x, name, gated), at::Tensor(), at::Tensor()};
  }
};

at::Tensor activation(const at::Tensor& x, const std::string& name, bool gated) {
  return FusedActivation::apply(x, name, gated);
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(timelyfreeze, m) {
  m.def("activation(Tensor x, str name, bool gated) -> Tensor");
  m.def("activation_backward(Tensor dy, Tensor x, str name, bool gated) -> Tensor");
}
TORCH_LIBRARY_IMPL(timelyfreeze, CPU, m) {
  m.impl("activation", &activation_forward);
  m.impl("activation_backward", &activation_backward);
}
TORCH_LIBRARY_IMPL(timelyfreeze, CUDA, m) {
  m.impl("activation", &activation_forward);
  m.impl("activation_backward", &activation_backward);
}

TORCH_LIBRARY_IMPL(timelyfreeze, Autograd, m) { m.impl("activation", &activation); }

}  // namespace timelyfreeze::ops
