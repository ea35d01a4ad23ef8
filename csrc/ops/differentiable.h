#pragma once
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

namespace timelyfreeze::ops {

using torch::autograd::variable_list;

// Gradients that can themselves be differentiated: by autograd, through the operator's plain formula. Called from a
// backward that has been asked for a graph; the fused kernels leave none.
template <class Formula>
variable_list differentiable_gradients(const Formula& formula, const variable_list& inputs,
                                       const variable_list& output_grads) {
  // Views, since an input may be an output of the very node that runs now, which the engine could not visit again.
  variable_list views;
  for (const at::Tensor& input : inputs) {
    views.push_back(input.defined() && input.requires_grad() ? input.view_as(input) : input);
  }
  const variable_list outputs = formula(views);
  variable_list roots;
  variable_list root_grads;
  for (size_t i = 0; i < outputs.size(); ++i) {
    if (!output_grads[i].defined() || !outputs[i].requires_grad()) continue;
    roots.push_back(outputs[i]);
    root_grads.push_back(output_grads[i]);
  }
  variable_list wanted;
  for (const at::Tensor& view : views) {
    if (view.defined() && view.requires_grad()) wanted.push_back(view);
  }
  variable_list result(inputs.size());
  if (roots.empty() || wanted.empty()) return result;
  variable_list found = torch::autograd::grad(roots, wanted, root_grads, /*retain_graph=*/true,
                                              /*create_graph=*/true, /*allow_unused=*/true);
  size_t next = 0;
  for (size_t i = 0; i < inputs.size(); ++i) {
    if (inputs[i].defined() && inputs[i].requires_grad()) result[i] = std::move(found[next++]);
  }
  return result;
}

}  // namespace timelyfreeze::ops
