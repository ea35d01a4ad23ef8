// The head and its loss, a chunk of rows at a time, so that the logits of a batch never exist together. A chunk's
// gradients are computed while its logits are there; backward only scales them. Formula: kernels/cross_entropy.h.
#include "kernels/cross_entropy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "ops/autocast.h"
#include "ops/checks.h"
#include "ops/differentiable.h"
#include "ops/fused.h"
#include "ops/product.h"
#include "ops/stream.h"

namespace timelyfreeze::ops {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;

// Chunks of a sixteenth keep the logits' memory small; smaller ones than this make the matrix products slow.
constexpr int64_t kChunks = 16;
constexpr int64_t kFewestRows = 64;

struct Settings {
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  bool average;
  int64_t chunk_rows;
};

// Turns logits into their gradients where wanted, and returns each row's loss.
at::Tensor losses_of(at::Tensor& logits, const at::Tensor& target, const Settings& settings, bool wants_gradient) {
  at::Tensor loss = at::empty({logits.size(0)}, logits.options().dtype(accumulation_type(logits)));
  kernels::CrossEntropyShape shape;
  shape.rows = logits.size(0);
  shape.cols = logits.size(1);
  shape.ignore_index = settings.ignore_index;
  shape.label_smoothing = settings.label_smoothing;
  shape.z_loss = settings.z_loss;
  shape.dtype = dtype_of(logits, "linear_cross_entropy");
  if (logits.is_cpu()) {
    kernels::cross_entropy_cpu(shape, logits.mutable_data_ptr(), target.const_data_ptr<int64_t>(),
                               loss.mutable_data_ptr(), wants_gradient);
  } else {
    const CudaLaunch launch(logits);
    kernels::cross_entropy_cuda(shape, logits.mutable_data_ptr(), target.const_data_ptr<int64_t>(),
                                loss.mutable_data_ptr<float>(), wants_gradient, launch.stream());
    launch.check();
  }
  return loss;
}

void check_inputs(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias, const at::Tensor& target,
                  const Settings& settings) {
  const char* op = "linear_cross_entropy";
  TORCH_CHECK_VALUE(x.dim() == 2 && weight.dim() == 2 && x.size(1) == weight.size(1), op,
                    ": expected x [..., width] and weight [classes, width], got ", x.sizes(), " and ", weight.sizes(),
                    ".");
  TORCH_CHECK_VALUE(target.dim() == 1 && target.size(0) == x.size(0), op, ": target: expected one class a row, ",
                    x.size(0), " rows, got shape ", target.sizes(), ".");
  for (const at::Tensor& tensor : {weight, bias, target}) {
    TORCH_CHECK_VALUE(!tensor.defined() || tensor.device() == x.device(), op,
                      ": weight, bias and target: expected device ", x.device(), ", got ", tensor.device(), ".");
  }
  TORCH_CHECK_TYPE(target.scalar_type() == at::kLong, op, ": target: expected int64, got ",
                   c10::toString(target.scalar_type()), ".");
  TORCH_CHECK_VALUE(!bias.defined() || (bias.dim() == 1 && bias.size(0) == weight.size(0)), op,
                    ": bias: expected [classes].");
  TORCH_CHECK_VALUE(settings.label_smoothing >= 0 && settings.label_smoothing <= 1, op,
                    ": label_smoothing: expected a number in [0, 1], got ", settings.label_smoothing, ".");
  TORCH_CHECK_VALUE(settings.chunk_rows >= 0, op, ": chunk_rows: expected 0 (automatic) or more, got ",
                    settings.chunk_rows, ".");
  if (target.is_cpu() && target.numel() > 0) {
    const auto* classes = target.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < target.numel(); ++i) {
      TORCH_CHECK_INDEX((classes[i] >= 0 && classes[i] < weight.size(0)) || classes[i] == settings.ignore_index, op,
                        ": target: expected classes from 0 to ", weight.size(0) - 1,
                        " or ignore_index=", settings.ignore_index, ", got ", classes[i], " in row ", i, ".");
    }
  }
}

// -> (summed loss, dx, dweight, dbias) for an upstream gradient of 1; what is not wanted is empty.
std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> linear_cross_entropy_forward(
    const at::Tensor& x_in, const at::Tensor& weight, const Optional& bias_in, const at::Tensor& target_in,
    int64_t ignore_index, double label_smoothing, double z_loss, int64_t chunk_rows, bool wants_x, bool wants_weight,
    bool wants_bias) {
  const Settings settings{ignore_index, label_smoothing, z_loss, false, chunk_rows};
  const at::Tensor x = x_in.contiguous();
  const at::Tensor target = target_in.contiguous();
  const at::Tensor bias = or_undefined(bias_in);
  check_inputs(x, weight, bias, target, settings);
  const int64_t rows = x.size(0);
  const int64_t automatic = std::max(kFewestRows, (rows + kChunks - 1) / kChunks);
  const int64_t step = chunk_rows > 0 ? chunk_rows : automatic;
  const auto sums = x.options().dtype(accumulation_type(x));
  at::Tensor total = at::zeros({}, sums);
  at::Tensor dx = wants_x ? at::empty_like(x) : at::empty({0}, x.options());
  at::Tensor dweight = wants_weight ? at::zeros(weight.sizes(), sums) : at::empty({0}, sums);
  at::Tensor dbias = wants_bias ? at::zeros({weight.size(0)}, sums) : at::empty({0}, sums);
  const bool wants_gradient = wants_x || wants_weight || wants_bias;
  for (int64_t first = 0; first < rows; first += step) {
    const int64_t count = std::min(step, rows - first);
    const at::Tensor part = x.narrow(0, first, count);
    at::Tensor logits = fast_linear(part, weight, bias_in);
    total.add_(losses_of(logits, target.narrow(0, first, count), settings, wants_gradient).sum());
    if (wants_x) {
      at::Tensor slice = dx.narrow(0, first, count);
      fast_product_into(slice, logits, weight);
    }
    if (wants_weight) {
      if (sums.dtype() == x.dtype()) {
        add_fast_product(dweight, logits.t(), part);
      } else {
        dweight.add_(at::mm(logits.t(), part));
      }
    }
    if (wants_bias) dbias.add_(logits.sum(0, /*keepdim=*/false, dbias.scalar_type()));
  }
  return {total, dx, dweight, dbias};
}

at::Tensor plain_loss(const variable_list& inputs, const at::Tensor& target, const Settings& settings) {
  const at::Tensor logits = at::linear(inputs[0], inputs[1], given(inputs[2])).to(accumulation_type(inputs[0]));
  const at::Tensor counts = target != settings.ignore_index;
  const at::Tensor lse = at::logsumexp(logits, {1});
  const at::Tensor picked = logits.gather(1, at::where(counts, target, 0).unsqueeze(1)).squeeze(1);
  const double smoothing = settings.label_smoothing;
  const at::Tensor loss = lse - picked * (1 - smoothing) - logits.mean(1) * smoothing + lse.square() * settings.z_loss;
  return at::where(counts, loss, at::zeros_like(loss)).sum();
}

struct LinearCrossEntropy : Function<LinearCrossEntropy> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x, const at::Tensor& weight, const Optional& bias,
                            const at::Tensor& target, const Settings& settings, bool recording) {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    static const auto op =
        find_operator<decltype(linear_cross_entropy_forward)>("timelyfreeze::linear_cross_entropy_forward");
    const auto wants = [&](const at::Tensor& tensor) {
      return recording && tensor.defined() && tensor.requires_grad();
    };
    auto [loss, dx, dweight, dbias] =
        op.call(x, weight, bias, target, settings.ignore_index, settings.label_smoothing, settings.z_loss,
                settings.chunk_rows, wants(x), wants(weight), wants(or_undefined(bias)));
    at::Tensor scale = at::ones_like(loss);
    at::Tensor gradient_scale = scale;
    if (settings.average) {
      const at::Tensor count = (target != settings.ignore_index).sum();
      scale = scale / count;  // of no row that counts: the loss is NaN, as torch has it, and the gradients are zeros
      gradient_scale = gradient_scale / count.clamp_min(1);
    }
    ctx->saved_data["wanted"] = c10::List<bool>({wants(x), wants(weight), wants(or_undefined(bias))});
    ctx->saved_data["ignore_index"] = settings.ignore_index;
    ctx->saved_data["label_smoothing"] = settings.label_smoothing;
    ctx->saved_data["z_loss"] = settings.z_loss;
    if (recording) ctx->save_for_backward({x, weight, or_undefined(bias), target, gradient_scale, dx, dweight, dbias});
    return loss * scale;
  }

  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const at::Tensor upstream = grads[0] * saved[4];
    const auto wanted = ctx->saved_data["wanted"].toBoolList();
    variable_list result(6);
    if (at::GradMode::is_enabled()) {
      const Settings settings{ctx->saved_data["ignore_index"].toInt(), ctx->saved_data["label_smoothing"].toDouble(),
                              ctx->saved_data["z_loss"].toDouble(), false, 0};
      const auto formula = [&](const variable_list& inputs) {
        return variable_list{plain_loss(inputs, saved[3], settings)};
      };
      const auto found = differentiable_gradients(formula, {saved[0], saved[1], saved[2]}, {upstream});
      std::copy(found.begin(), found.end(), result.begin());
      return result;
    }
    for (size_t i = 0; i < 3; ++i) {
      if (!wanted[i]) continue;
      result[i] = (saved[5 + i] * upstream).to(saved[i].scalar_type());
    }
    return result;
  }
};

at::Tensor linear_cross_entropy(const at::Tensor& x_in, const at::Tensor& weight, const Optional& bias,
                                const at::Tensor& target, int64_t ignore_index, double label_smoothing, double z_loss,
                                bool average, int64_t chunk_rows) {
  const at::Tensor x = autocast_to(x_in);
  const at::Tensor w = autocast_to(weight);
  const at::Tensor b = bias && bias->defined() ? autocast_to(*bias) : at::Tensor();
  const Settings settings{ignore_index, label_smoothing, z_loss, average, chunk_rows};
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  return LinearCrossEntropy::apply(x.dim() > 1 ? x.flatten(0, -2) : x.unsqueeze(0), w, given(b), target.flatten(),
                                   settings, records({x, w, b}));
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(timelyfreeze, m) {
  m.def(
      "linear_cross_entropy_forward(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
      "float label_smoothing, float z_loss, int chunk_rows, bool wants_x, bool wants_weight, bool wants_bias) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "linear_cross_entropy(Tensor x, Tensor weight, Tensor? bias, Tensor target, int ignore_index, "
      "float label_smoothing, float z_loss, bool average, int chunk_rows) -> Tensor");
}
TORCH_LIBRARY_IMPL(timelyfreeze, CPU, m) { m.impl("linear_cross_entropy_forward", &linear_cross_entropy_forward); }
TORCH_LIBRARY_IMPL(timelyfreeze, CUDA, m) { m.impl("linear_cross_entropy_forward", &linear_cross_entropy_forward); }

TORCH_LIBRARY_IMPL(timelyfreeze, Autograd, m) { m.impl("linear_cross_entropy", &linear_cross_entropy); }
TORCH_LIBRARY_IMPL(timelyfreeze, CompositeExplicitAutograd, m) {
  m.impl("linear_cross_entropy", &linear_cross_entropy);  // without a graph, apply() is the forward alone
}

}  // namespace timelyfreeze::ops
