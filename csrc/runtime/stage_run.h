#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

#include "runtime/stage.h"

// What an action does inside a stage, whoever orders the actions.
namespace timelyfreeze {

bool can_require_grad(const at::Tensor& tensor);

// Releases the interpreter lock where user code does not need it; rethrows its errors and leaves none behind.
void run_backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& grads);

// Keeps in `held` the outputs that a gradient can come for and detaches all of them; returns which those are.
std::vector<bool> keep_outputs(Value& value, bool carries_grad, Held& held);

// A micro-batch's loss, and of a (sum, count) loss the count, else a null object.
struct StageLoss {
  at::Tensor tensor;
  pybind11::object count;
};

// These need the interpreter lock. The output goes before the loss is looked at: logits are large.
pybind11::object call_loss(const pybind11::object& loss_fn, pybind11::object output, const pybind11::object& target);
StageLoss split_loss(const pybind11::object& loss);
[[noreturn]] void throw_constant_loss();

}  // namespace timelyfreeze
