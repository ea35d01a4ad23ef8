#include "runtime/packed_linear.h"

#include <ATen/ExpandUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/embedding.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <utility>

#include "ops/product.h"
#include "runtime/deferred_grad.h"
#include "runtime/deferred_nodes.h"

namespace timelyfreeze {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using Biases = std::vector<std::optional<at::Tensor>>;

bool lie_behind_each_other(const std::vector<at::Tensor>& weights) {
  const at::Tensor& first = weights.front();
  int64_t next = first.storage_offset();
  for (const at::Tensor& weight : weights) {
    if (!weight.is_contiguous() || !weight.storage().is_alias_of(first.storage()) || weight.storage_offset() != next ||
        weight.scalar_type() != first.scalar_type()) {
      return false;
    }
    next += weight.numel();
  }
  return true;
}

// The weights as one matrix: a view, where they lie behind each other.
at::Tensor stacked(const std::vector<at::Tensor>& weights) {
  if (weights.size() == 1) return weights.front();
  int64_t rows = 0;
  for (const at::Tensor& weight : weights) rows += weight.size(0);
  const int64_t width = weights.front().size(1);
  return weights.front().as_strided({rows, width}, {width, 1}, weights.front().storage_offset());
}

// The products without autograd. Weights that lie apart are multiplied one by one, each into its columns: copying them
// together first took 6 % of a LLaMA block's time at width 256.
at::Tensor multiply(const at::Tensor& input, const std::vector<at::Tensor>& weights, const Biases& biases) {
  const bool has_bias =
      std::any_of(biases.begin(), biases.end(), [](const auto& bias) { return bias && bias->defined(); });
  if (weights.size() == 1) return fast_linear(input, weights[0], biases[0]);
  if (!has_bias && lie_behind_each_other(weights)) return fast_linear(input, stacked(weights), std::nullopt);
  const at::Tensor x = as_rows(input);
  int64_t features = 0;
  for (const at::Tensor& weight : weights) features += weight.size(0);
  auto sizes = input.sizes().vec();
  sizes.back() = features;
  at::Tensor output = at::empty({x.size(0), features}, x.options());
  int64_t first = 0;
  for (size_t i = 0; i < weights.size(); first += weights[i++].size(0)) {
    at::Tensor columns = output.narrow(1, first, weights[i].size(0));
    if (biases[i] && biases[i]->defined()) {
      columns.copy_(biases[i]->expand_as(columns));
      add_fast_product(columns, x, weights[i].t());
    } else {
      fast_product_into(columns, x, weights[i].t());
    }
  }
  return output.view(sizes);
}

at::Tensor input_gradient(const at::Tensor& grad, const std::vector<at::Tensor>& weights) {
  const bool together = weights.size() == 1 || lie_behind_each_other(weights);
  const at::Tensor g = as_rows(grad);
  at::Tensor result =
      together ? fast_product(g, stacked(weights)) : fast_product(g.narrow(1, 0, weights[0].size(0)), weights[0]);
  int64_t first = weights[0].size(0);
  for (size_t i = 1; i < weights.size() && !together; first += weights[i++].size(0)) {
    add_fast_product(result, g.narrow(1, first, weights[i].size(0)), weights[i]);
  }
  auto sizes = grad.sizes().vec();
  sizes.back() = result.size(1);
  return result.view(sizes);
}

// For autograd, which has to see how weights and biases come together.
at::Tensor plain_packed_linear(const at::Tensor& input, const std::vector<at::Tensor>& weights, const Biases& biases) {
  if (weights.size() == 1) return at::linear(input, weights[0], biases[0]);
  std::vector<at::Tensor> parts;
  for (size_t i = 0; i < weights.size(); ++i) parts.push_back(at::linear(input, weights[i], biases[i]));
  return at::cat(parts, -1);
}

class PackedLinear : public DeferredNode {
 public:
  // `weights` are [out, in]: where the leaves are [in, out], their transpositions.
  PackedLinear(const at::Tensor& input, const std::vector<at::Tensor>& weights, const Biases& biases,
               std::vector<at::Tensor> leaves, bool transposed, std::shared_ptr<WeightQueue> queue)
      : DeferredNode(std::move(queue)), leaves_(std::move(leaves)), transposed_(transposed) {
    const bool trains =
        std::any_of(weights.begin(), weights.end(), [](const at::Tensor& weight) { return weight.requires_grad(); });
    if (trains) input_ = SavedVariable(input, /*is_output=*/false);
    variable_list inputs{input};
    for (const at::Tensor& weight : weights) {
      rows_.push_back(weight.size(0));
      weights_.emplace_back(input.requires_grad() ? SavedVariable(weight, /*is_output=*/false) : SavedVariable());
      inputs.push_back(weight);
    }
    for (const auto& bias : biases) inputs.push_back(bias.value_or(at::Tensor()));
    set_next_edges(torch::autograd::collect_next_edges(inputs));
  }

  variable_list apply(variable_list&& grads) override {
    const at::Tensor grad = std::move(grads[0]);
    const size_t num = rows_.size();
    variable_list result(1 + 2 * num);
    if (!grad.defined()) return result;
    if (task_should_compute_output(0)) {
      std::vector<at::Tensor> weights;
      for (const SavedVariable& weight : weights_) weights.push_back(weight.unpack());
      result[0] = at::GradMode::is_enabled() ? grad.matmul(at::cat(weights)) : input_gradient(grad, weights);
    }
    at::Tensor input;
    int64_t first = 0;
    for (size_t i = 0; i < num; first += rows_[i++]) {
      const size_t weight = 1 + i;
      const size_t bias = 1 + num + i;
      const at::Tensor part = num == 1 ? grad : grad.narrow(-1, first, rows_[i]);
      // Frozen since forward: autograd's own accumulation asks again, too.
      const bool frozen = leaves_[i].defined() && !leaves_[i].requires_grad();
      if (task_should_compute_output(weight) && !frozen) {
        if (!input.defined()) input = input_.unpack();  // once: checkpointing allows no more
        if (leaves_[i].defined() && accumulates(weight)) {
          leave({input.detach(), grad}, [leaf = leaves_[i], x = input.detach(), part, transposed = transposed_] {
            if (transposed) {
              accumulate_fast_product(leaf, as_rows(x).t(), as_rows(part));
            } else {
              accumulate_fast_product(leaf, as_rows(part).t(), as_rows(x));
            }
          });
        } else {
          result[weight] = as_rows(part).t().matmul(as_rows(input));
        }
      }
      if (task_should_compute_output(bias)) result[bias] = at::sum_to(part, at::IntArrayRef(rows_[i]));
    }
    return result;
  }

  void release_variables() override {
    input_.reset_data();
    for (SavedVariable& weight : weights_) weight.reset_data();
  }

 private:
  SavedVariable input_;
  std::vector<SavedVariable> weights_;
  std::vector<int64_t> rows_;
  const std::vector<at::Tensor> leaves_;  // undefined where the gradient is autograd's to accumulate
  const bool transposed_;                 // leaves are [in, out]
};

void check(const at::Tensor& input, const std::vector<at::Tensor>& weights, const Biases& biases) {
  TORCH_CHECK_VALUE(!weights.empty() && biases.size() == weights.size(),
                    "packed_linear: expected as many biases (or None) as weights, at least one, got ", weights.size(),
                    " weights and ", biases.size(), " biases.");
  for (size_t i = 0; i < weights.size(); ++i) {
    TORCH_CHECK_VALUE(weights[i].dim() == 2 && input.dim() > 0 && weights[i].size(1) == input.size(-1),
                      "packed_linear: weight ", i, ": expected [features, ", input.dim() > 0 ? input.size(-1) : 0,
                      "] for an input of shape ", input.sizes(), ", got ", weights[i].sizes(), ".");
    const bool has = biases[i] && biases[i]->defined();
    TORCH_CHECK_VALUE(!has || (biases[i]->dim() == 1 && biases[i]->size(0) == weights[i].size(0)),
                      "packed_linear: bias ", i, ": expected [", weights[i].size(0), "].");
  }
}

bool requires_grad(const std::optional<at::Tensor>& tensor) {
  return tensor && tensor->defined() && tensor->requires_grad();
}

// A leaf whose gradient need not pass through autograd: of this stage, where gradients wait.
bool is_own_leaf(const at::Tensor& tensor) {
  return tensor.is_leaf() && tensor.requires_grad() && tensor.is_floating_point() && is_plain(tensor) &&
         (defer_target() == nullptr || defer_target()->stage.owns(tensor));
}

std::vector<at::Tensor> transpositions(const std::vector<at::Tensor>& weights) {
  std::vector<at::Tensor> turned;
  for (const at::Tensor& weight : weights) turned.push_back(weight.dim() == 2 ? weight.t() : weight);
  return turned;
}

std::shared_ptr<WeightQueue> queue_now() { return defer_target() == nullptr ? nullptr : defer_target()->queue; }

}  // namespace

at::Tensor packed_linear(const at::Tensor& input, const std::vector<at::Tensor>& stored, const Biases& biases,
                         bool transposed) {
  const std::vector<at::Tensor> weights = transposed ? transpositions(stored) : stored;
  if (weights.size() == 1 && weights[0].dim() == 2 && input.dim() > 0 && weights[0].size(1) != input.size(-1)) {
    return at::linear(input, weights[0]);  // whose error says what does not fit, as torch's own layer would
  }
  check(input, weights, biases);
  const bool records = at::GradMode::is_enabled() &&
                       (input.requires_grad() || std::any_of(weights.begin(), weights.end(), requires_grad) ||
                        std::any_of(biases.begin(), biases.end(), requires_grad));
  const bool plain =
      std::all_of(weights.begin(), weights.end(), is_plain) &&
      std::all_of(biases.begin(), biases.end(), [](const auto& bias) { return !bias || is_plain(*bias); });
  if (!plain || !is_plain(input) || (records && !may_record(input))) return plain_packed_linear(input, weights, biases);
  const at::Tensor x = autocast_to(input);
  std::vector<at::Tensor> cast;
  std::vector<at::Tensor> leaves;
  Biases cast_biases;
  for (size_t i = 0; i < weights.size(); ++i) {
    cast.push_back(autocast_to(weights[i]));
    leaves.push_back(records && is_own_leaf(stored[i]) ? stored[i] : at::Tensor());
    cast_biases.push_back(biases[i] && biases[i]->defined() ? std::make_optional(autocast_to(*biases[i]))
                                                            : std::nullopt);
  }
  NodePtr node =
      records ? make_node<PackedLinear>(x, cast, cast_biases, std::move(leaves), transposed, queue_now()) : nullptr;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  at::Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = multiply(x, cast, cast_biases);
  }
  if (node) torch::autograd::set_history(output, node);
  return output;
}

at::Tensor fused_embedding(const at::Tensor& indices, const at::Tensor& weight, int64_t padding_index) {
  if (!is_own_leaf(weight) || !may_record(indices)) {
    return at::embedding(weight, indices, padding_index, /*scale_grad_by_freq=*/false, /*sparse=*/false);
  }
  auto node = make_node<DeferredEmbedding>(weight, indices, padding_index, queue_now());
  at::Tensor output;
  {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    output = at::embedding(weight, indices, padding_index, false, false);
  }
  torch::autograd::set_history(output, node);
  return output;
}

}  // namespace timelyfreeze
