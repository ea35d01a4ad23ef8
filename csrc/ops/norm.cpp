// RMSNorm and LayerNorm with a residual stream; formulas and bytes in kernels/norm.h.
#include "kernels/norm.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <tuple>

#include "ops/checks.h"
#include "ops/differentiable.h"
#include "ops/fused.h"
#include "ops/stream.h"

namespace timelyfreeze::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
kernels::NormShape shape_of(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, double eps,
                            bool centered) {
  const char* op = centered ? "layer_norm" : "rms_norm";
  kernels::NormShape shape;
  shape.cols = x.size(-1);
  shape.rows = shape.cols == 0 ? 0 : x.numel() / shape.cols;
  shape.centered = centered;
  shape.eps = eps;
  shape.dtype = dtype_of(x, op);
  shape.weight_dtype = weight.defined() ? dtype_of(weight, op) : bias.defined() ? dtype_of(bias, op) : shape.dtype;
  return shape;
}

void check_inputs(const at::Tensor& x, const at::Tensor& residual, const at::Tensor& weight, const at::Tensor& bias,
                  bool centered) {
  const char* op = centered ? "layer_norm" : "rms_norm";
  TORCH_CHECK_VALUE(x.dim() > 0, op, ": x: expected at least 1 dimension, got a scalar.");
  if (residual.defined()) {
    TORCH_CHECK_VALUE(residual.device() == x.device(), op, ": residual: expected device ", x.device(), ", got ",
                      residual.device(), ".");
    TORCH_CHECK_VALUE(residual.sizes() == x.sizes() && residual.scalar_type() == x.scalar_type(), op,
                      ": residual: expected the shape and dtype of x, ", x.sizes(), " ", x.scalar_type(), ", got ",
                      residual.sizes(), " ", residual.scalar_type(), ".");
  }
  for (const at::Tensor& vector : {weight, bias}) {
    if (!vector.defined()) continue;
    TORCH_CHECK_VALUE(vector.dim() == 1 && vector.size(0) == x.size(-1), op, ": weight and bias: expected shape [",
                      x.size(-1), "], x's last dimension, got ", vector.sizes(), ".");
    TORCH_CHECK_VALUE(vector.device() == x.device(), op, ": weight and bias: expected device ", x.device(), ", got ",
                      vector.device(), ".");
  }
  if (weight.defined() && bias.defined()) {
    TORCH_CHECK_VALUE(weight.scalar_type() == bias.scalar_type(), op, ": bias: expected the weight's dtype ",
                      weight.scalar_type(), ", got ", bias.scalar_type(), ".");
  }
}

// -> (y, h, mean, rstd); h is empty where there is no residual, the statistics where they are not wanted.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> norm_forward(const at::Tensor& x_in,
                                                                        const Optional& residual_in,
                                                                        const Optional& weight_in,
                                                                        const Optional& bias_in, double eps,
                                                                        bool centered, bool keep) {
  const at::Tensor x = x_in.contiguous();
  const at::Tensor residual = contiguous_or_undefined(or_undefined(residual_in));
  const at::Tensor weight = contiguous_or_undefined(or_undefined(weight_in));
  const at::Tensor bias = contiguous_or_undefined(or_undefined(bias_in));
  check_inputs(x, residual, weight, bias, centered);
  const auto shape = shape_of(x, weight, bias, eps, centered);
  const auto statistics = x.options().dtype(accumulation_type(x));
  at::Tensor y = at::empty_like(x);
  at::Tensor h = residual.defined() ? at::empty_like(x) : at::empty({0}, x.options());
  at::Tensor mean = at::empty({keep && centered ? shape.rows : 0}, statistics);
  at::Tensor rstd = at::empty({keep ? shape.rows : 0}, statistics);
  if (x.numel() == 0) return {y, h, mean, rstd};
  kernels::NormForward arrays;
  arrays.x = x.const_data_ptr();
  arrays.residual = data_or_null(residual);
  arrays.weight = data_or_null(weight);
  arrays.bias = data_or_null(bias);
  arrays.h = residual.defined() ? h.mutable_data_ptr() : nullptr;
  arrays.y = y.mutable_data_ptr();
  arrays.mean = keep && centered ? mean.mutable_data_ptr() : nullptr;
  arrays.rstd = keep ? rstd.mutable_data_ptr() : nullptr;
  if (x.is_cpu()) {
    kernels::norm_forward_cpu(shape, arrays);
  } else {
    const CudaLaunch launch(x);
    kernels::norm_forward_cuda(shape, arrays, launch.stream());
    launch.check();
  }
  return {y, h, mean, rstd};
}

// -> (dx, dweight, dbias); those that are not wanted are empty. dh may be left out.
std::tuple<at::Tensor, at::Tensor, at::Tensor> norm_backward(const at::Tensor& dy_in, const Optional& dh_in,
                                                             const at::Tensor& h_in, const Optional& weight_in,
                                                             const at::Tensor& mean, const at::Tensor& rstd,
                                                             bool centered, bool wants_weight, bool wants_bias) {
  const at::Tensor dy = dy_in.contiguous();
  const at::Tensor dh = contiguous_or_undefined(or_undefined(dh_in));
  const at::Tensor h = h_in.contiguous();
  const at::Tensor weight = contiguous_or_undefined(or_undefined(weight_in));
  const auto shape = shape_of(h, weight, at::Tensor(), /*eps=*/0.0, centered);
  at::Tensor dx = at::empty_like(h);
  const auto vector_options = weight.defined() ? weight.options() : h.options();
  const auto partial_options = h.options().dtype(accumulation_type(h));
  kernels::NormBackward arrays;
  arrays.num_partials = h.is_cpu() ? kernels::norm_num_partials_cpu(shape) : kernels::norm_num_partials_cuda(shape);
  const auto partials = [&](bool wanted) {
    return wanted ? at::empty({arrays.num_partials, shape.cols}, partial_options) : at::Tensor();
  };
  const at::Tensor dweight = partials(wants_weight);
  const at::Tensor dbias = partials(wants_bias);
  if (h.numel() > 0) {
    arrays.dy = dy.const_data_ptr();
    arrays.dh = data_or_null(dh);
    arrays.h = h.const_data_ptr();
    arrays.weight = data_or_null(weight);
    arrays.mean = centered ? mean.const_data_ptr() : nullptr;
    arrays.rstd = rstd.const_data_ptr();
    arrays.dx = dx.mutable_data_ptr();
    arrays.dweight = mutable_data_or_null(dweight);
    arrays.dbias = mutable_data_or_null(dbias);
    if (h.is_cpu()) {
      kernels::norm_backward_cpu(shape, arrays);
    } else {
      const CudaLaunch launch(h);
      kernels::norm_backward_cuda(shape, arrays, launch.stream());
      launch.check();
    }
  }
  const auto reduced = [&](const at::Tensor& sums) {
    if (!sums.defined()) return at::empty({0}, vector_options);
    if (h.numel() == 0) return at::zeros({shape.cols}, vector_options);
    return sums.sum(0).to(vector_options.dtype());
  };
  return {dx, reduced(dweight), reduced(dbias)};
}

// As formulas of autograd's own operators, for gradients of gradients.
variable_list plain_norm(const variable_list& inputs, double eps, bool centered) {
  const at::Tensor& h = inputs[0];
  const auto size = h.sizes().slice(h.dim() - 1);
  const Optional weight = inputs[1].defined() ? Optional(inputs[1]) : std::nullopt;
  const Optional bias = inputs[2].defined() ? Optional(inputs[2]) : std::nullopt;
  return {centered ? at::layer_norm(h, size, weight, bias, eps) : at::rms_norm(h, size, weight, eps)};
}

struct Norm : Function<Norm> {
  static variable_list forward(AutogradContext* ctx, const at::Tensor& x, const Optional& residual,
                               const Optional& weight, const Optional& bias, double eps, bool centered, bool keep,
                               bool passes_on) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op = find_operator<decltype(norm_forward)>("timelyfreeze::norm_forward");
    auto [y, h, mean, rstd] = op.call(x, residual, weight, bias, eps, centered, keep);
    ctx->saved_data["eps"] = eps;
    ctx->saved_data["centered"] = centered;
    ctx->saved_data["wants_weight"] = weight && weight->requires_grad();
    ctx->saved_data["has_residual"] = residual.has_value();
    ctx->saved_data["wants_bias"] = bias && bias->requires_grad();
    ctx->set_materialize_grads(false);
    if (keep) ctx->save_for_backward({residual ? h : x, or_undefined(weight), or_undefined(bias), mean, rstd});
    if (residual) {
      // Weights alone are trained: nothing flows back through the sum.
      if (!x.requires_grad() && !residual->requires_grad()) ctx->mark_non_differentiable({h});
      return {y, h};
    }
    return passes_on ? variable_list{y, x} : variable_list{y};
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const double eps = ctx->saved_data["eps"].toDouble();
    const bool centered = ctx->saved_data["centered"].toBool();
    const auto saved = ctx->get_saved_variables();
    const at::Tensor& h = saved[0];
    const at::Tensor dy = grads[0];
    const at::Tensor dh = grads.size() > 1 ? grads[1] : at::Tensor();
    const bool has_residual = ctx->saved_data["has_residual"].toBool();
    variable_list result(8);
    if (!dy.defined()) {
      result[0] = dh;
      if (has_residual) result[1] = dh;
      return result;
    }
    if (at::GradMode::is_enabled()) {
      const auto formula = [&](const variable_list& inputs) { return plain_norm(inputs, eps, centered); };
      variable_list found = differentiable_gradients(formula, {h, saved[1], saved[2]}, {dy});
      result[0] = !dh.defined() ? found[0] : found[0].defined() ? found[0] + dh : dh;
      if (has_residual) result[1] = result[0];
      result[2] = found[1];
      result[3] = found[2];
      return result;
    }
    static const auto op = find_operator<decltype(norm_backward)>("timelyfreeze::norm_backward");
    const bool wants_weight = ctx->saved_data["wants_weight"].toBool();
    const bool wants_bias = ctx->saved_data["wants_bias"].toBool();
    auto [dx, dweight, dbias] =
        op.call(dy, given(dh), h, given(saved[1]), saved[3], saved[4], centered, wants_weight, wants_bias);
    result[0] = dx;
    if (has_residual) result[1] = dx;
    if (wants_weight) result[2] = dweight;
    if (wants_bias) result[3] = dbias;
    return result;
  }
};

}  // namespace

// -> {y} or {y, h}: h where there is a residual, or, where `passes_on`, x itself.
variable_list norm(const at::Tensor& x, const Optional& residual, const Optional& weight, const Optional& bias,
                   double eps, bool centered, bool passes_on) {
  const bool keep = records({x, or_undefined(residual), or_undefined(weight), or_undefined(bias)});
  if (passes_on && !x.requires_grad()) return {norm(x, residual, weight, bias, eps, centered, false)[0], x};
  return Norm::apply(x, given(or_undefined(residual)), given(or_undefined(weight)), given(or_undefined(bias)), eps,
                     centered, keep, passes_on);
}

namespace {

std::tuple<at::Tensor, at::Tensor> norm_operator(const at::Tensor& x, const Optional& residual, const Optional& weight,
                                                 const Optional& bias, double eps, bool centered) {
  const auto made = norm(x, residual, weight, bias, eps, centered, /*passes_on=*/false);
  return {made[0], made.size() > 1 ? made[1] : at::empty({0}, x.options())};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(timelyfreeze, m) {
  // -> (y, h); h is empty where there is no residual.
  m.def("norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered) -> (Tensor, Tensor)");
  m.def(
      "norm_forward(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps, bool centered, bool keep) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "norm_backward(Tensor dy, Tensor? dh, Tensor h, Tensor? weight, Tensor mean, Tensor rstd, bool centered, "
      "bool wants_weight, bool wants_bias) -> (Tensor, Tensor, Tensor)");
}
TORCH_LIBRARY_IMPL(timelyfreeze, CPU, m) {
  m.impl("norm_forward", &norm_forward);
  m.impl("norm_backward", &norm_backward);
}
TORCH_LIBRARY_IMPL(timelyfreeze, CUDA, m) {
  m.impl("norm_forward", &norm_forward);
  m.impl("norm_backward", &norm_backward);
}

TORCH_LIBRARY_IMPL(timelyfreeze, Autograd, m) { m.impl("norm", &norm_operator); }
TORCH_LIBRARY_IMPL(timelyfreeze, CompositeExplicitAutograd, m) { m.impl("norm", &norm_operator); }

}  // namespace timelyfreeze::ops
