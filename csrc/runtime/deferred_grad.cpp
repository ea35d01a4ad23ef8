#include "runtime/deferred_grad.h"

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/bmm.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mm.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/library.h>

#include "runtime/deferred_nodes.h"
#include "runtime/rng.h"

namespace timelyfreeze {
namespace {

using torch::autograd::Node;

// c10 keeps this kind free, as it does kActionKey.
const c10::DebugInfoKind kQueue = c10::DebugInfoKind::TEST_INFO_2;

bool may_accumulate(const at::Tensor& leaf) {
  return is_plain(leaf) && leaf.requires_grad() && leaf.is_floating_point() && defer_target()->stage.owns(leaf);
}

// The parameter that `weight` is, or is a cast (autocast's, say) or a transposition of.
std::optional<Parameter> parameter_behind(const at::Tensor& weight) {
  if (!is_plain(weight) || !weight.requires_grad()) return std::nullopt;
  Parameter found{weight, false};
  if (!weight.is_leaf()) {
    const Node* node = weight.grad_fn().get();
    while (node->num_outputs() == 1 && node->next_edge(0).is_valid()) {
      const std::string name = node->name();
      if (name == "TBackward0") {
        found.transposed = !found.transposed;
      } else if (name != "ToCopyBackward0") {
        return std::nullopt;
      }
      node = node->next_edge(0).function.get();
    }
    const auto* end = dynamic_cast<const torch::autograd::AccumulateGrad*>(node);
    if (end == nullptr || end->variable.device() != weight.device()) return std::nullopt;
    found.tensor = end->variable;
  }
  if (!may_accumulate(found.tensor)) return std::nullopt;
  return found;
}

// Whether a weight gradient may wait: there is somewhere to wait.
bool can_defer(const at::Tensor& input) { return defer_target() != nullptr && may_record(input); }

// input @ weight + bias, as `compute` says. `is_linear`: the weight is [out, in], else [in, out] (or a batch of these).
template <class Compute>
at::Tensor product(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                   bool is_linear, Compute compute) {
  const c10::impl::ExcludeDispatchKeyGuard below(kActionKey);
  const bool fits = weight.dim() == 2 || (weight.dim() == 3 && input.dim() == 3 && weight.size(0) == input.size(0));
  const bool has_bias = bias && bias->defined();
  if (!fits || !can_defer(input) || (has_bias && !is_plain(*bias))) return compute(input, weight, bias);
  const auto parameter = parameter_behind(weight);
  if (!parameter) return compute(input, weight, bias);
  const at::Tensor x = autocast_to(input);
  const at::Tensor w = autocast_to(weight);
  const std::optional<at::Tensor> b = has_bias ? std::make_optional(autocast_to(*bias)) : std::nullopt;
  const bool bias_waits = has_bias && bias->is_leaf() && bias->dim() == 1 && may_accumulate(*bias);
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto node = make_node<DeferredProduct>(x, w, b, is_linear, *parameter, bias_waits ? *bias : at::Tensor(),
                                         defer_target()->queue);
  at::Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = compute(x, w, b);
  }
  torch::autograd::set_history(output, node);
  return output;
}

at::Tensor linear(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias) {
  return product(input, weight, bias, /*is_linear=*/true,
                 [](const auto& x, const auto& w, const auto& b) { return at::linear(x, w, b); });
}

at::Tensor matmul(const at::Tensor& input, const at::Tensor& weight) {
  return product(input, weight, std::nullopt, /*is_linear=*/false,
                 [](const auto& x, const auto& w, const auto&) { return at::matmul(x, w); });
}

at::Tensor mm(const at::Tensor& input, const at::Tensor& weight) {
  return product(input, weight, std::nullopt, /*is_linear=*/false,
                 [](const auto& x, const auto& w, const auto&) { return at::mm(x, w); });
}

at::Tensor bmm(const at::Tensor& input, const at::Tensor& weight) {
  return product(input, weight, std::nullopt, /*is_linear=*/false,
                 [](const auto& x, const auto& w, const auto&) { return at::bmm(x, w); });
}

at::Tensor addmm(const at::Tensor& bias, const at::Tensor& input, const at::Tensor& weight, const at::Scalar& beta,
                 const at::Scalar& alpha) {
  if (!beta.equal(1) || !alpha.equal(1)) {
    const c10::impl::ExcludeDispatchKeyGuard below(kActionKey);
    return at::addmm(bias, input, weight, beta, alpha);
  }
  return product(input, weight, bias, /*is_linear=*/false,
                 [](const auto& x, const auto& w, const auto& b) { return at::addmm(*b, x, w); });
}

// Under autocast conv1d, conv2d, ... have cast before they come to this, and autocast is off here; where it is on, the
// caller named this operator, which some devices cast for and some do not.
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                       at::IntArrayRef stride, at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                       at::IntArrayRef output_padding, int64_t groups) {
  const c10::impl::ExcludeDispatchKeyGuard below(kActionKey);
  const bool casts = at::autocast::is_autocast_enabled(input.device().type());
  const auto parameter = !casts && can_defer(input) ? parameter_behind(weight) : std::nullopt;
  if (!parameter || parameter->transposed) {
    return at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  }
  const ConvolutionShape shape{stride.vec(), padding.vec(), dilation.vec(), output_padding.vec(), groups, transposed};
  auto node = make_node<DeferredConvolution>(input, weight, bias, shape, parameter->tensor, defer_target()->queue);
  at::Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = at::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups);
  }
  torch::autograd::set_history(output, node);
  return output;
}

at::Tensor embedding(const at::Tensor& weight, const at::Tensor& indices, int64_t padding_index,
                     bool scale_by_frequency, bool sparse) {
  const c10::impl::ExcludeDispatchKeyGuard below(kActionKey);
  if (scale_by_frequency || sparse || !can_defer(indices) || !weight.is_leaf() || !may_accumulate(weight)) {
    return at::embedding(weight, indices, padding_index, scale_by_frequency, sparse);
  }
  auto node = make_node<DeferredEmbedding>(weight, indices, padding_index, defer_target()->queue);
  at::Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = at::embedding(weight, indices, padding_index);
  }
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace

const DeferTarget* defer_target() { return static_cast<const DeferTarget*>(c10::ThreadLocalDebugInfo::get(kQueue)); }

bool is_plain(const at::Tensor& tensor) {
  static const c10::DispatchKeySet special({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot,
                                            c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                            c10::DispatchKey::Functionalize, c10::DispatchKey::Batched,
                                            c10::DispatchKey::Negative, c10::DispatchKey::ZeroTensor});
  return tensor.defined() && tensor.layout() == at::kStrided && !tensor.key_set().has_any(special) &&
         (tensor.is_cpu() || tensor.is_cuda()) && tensor.numel() > 0 && !torch::autograd::isFwGradDefined(tensor);
}

bool may_record(const at::Tensor& input) {
  return at::GradMode::is_enabled() && is_plain(input) && !input.is_complex() &&
         !c10::impl::TorchDispatchModeTLS::any_modes_set() && !torch::autograd::AnomalyMode::is_enabled() &&
         !c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

DeferScope::DeferScope(const std::shared_ptr<WeightQueue>& queue, const Stage& stage)
    : guard_(kQueue, std::make_shared<DeferTarget>(queue, stage)) {}

void register_deferred_operators() {
  // Lives as long as the process: the dispatcher outlives every module.
  static auto* library = [] {
    auto* aten = new torch::Library(torch::Library::IMPL, "aten", kActionKey, __FILE__, __LINE__);
    aten->impl("linear", &linear);
    aten->impl("matmul", &matmul);
    aten->impl("mm", &mm);
    aten->impl("bmm", &bmm);
    aten->impl("addmm", &addmm);
    aten->impl("convolution", &convolution);
    aten->impl("embedding", &embedding);
    return aten;
  }();
  (void)library;
}

}  // namespace timelyfreeze
