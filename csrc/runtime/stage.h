#pragma once
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <unordered_set>
#include <vector>

#include "runtime/node.h"
#include "runtime/python_ref.h"

namespace timelyfreeze {

// What a stage takes or returns: its tensors, and how they are put together into the Python value. Without a spec the
// value is the one tensor itself.
struct Value {
  std::vector<at::Tensor> tensors;
  PyRef spec;
};

// The end of a stage's graph: stands behind an input tensor and keeps the gradient that arrives. Unlike a leaf, such an
// input may be written in place, as the same tensor may in the model that is not split.
struct InputGrad : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& grads) override {
    grad = std::move(grads[0]);
    return {};
  }
  at::Tensor grad;
};

// Returns `tensor`, detached, with an InputGrad behind it, which it stores in `node`.
at::Tensor require_input_grad(const at::Tensor& tensor, NodePtr& node);

// What a micro-batch leaves in a stage between its forward and its backward.
struct Held {
  // The gradient of input i; undefined where none was wanted or none arrived.
  [[nodiscard]] at::Tensor input_grad(size_t i) const {
    return inputs[i] ? static_cast<const InputGrad&>(*inputs[i]).grad : at::Tensor();
  }

  std::vector<NodePtr> inputs;      // InputGrads; null where no gradient is wanted
  std::vector<at::Tensor> outputs;  // undefined where no gradient can come
  at::Tensor loss;
  std::vector<at::Tensor> received;  // of a last stage, from another process: until its loss is known
};

// A stage's user code and parameters. All its methods are called from one worker at a time.
class Stage {
 public:
  // `forward` is called with the value's one argument, or through the spec's `call(forward, tensors, *extra)`;
  // `encode` takes apart a returned value that is not a tensor: value -> (tensors, spec).
  Stage(pybind11::object forward, pybind11::object encode, std::vector<at::Tensor> parameters);

  [[nodiscard]] const std::vector<at::Tensor>& parameters() const { return parameters_; }
  [[nodiscard]] const std::vector<bool>& trainable() const { return trainable_; }
  // Whether `tensor` is one of the parameters, the very tensor.
  [[nodiscard]] bool owns(const at::Tensor& tensor) const { return owned_.count(tensor.unsafeGetTensorImpl()) != 0; }

  // Calls the user's module. Needs the interpreter lock, as do the two below.
  pybind11::object call(const Value& input, const pybind11::object& extra) const;
  [[nodiscard]] Value take_apart(const pybind11::object& object) const;

  // Gives every gradient memory of its own. Autograd may take a view of what it is passing on for a `.grad`, and a
  // later micro-batch then adds to memory that a weight gradient still waits to read.
  void unshare_gradients() const;
  // Takes note of which parameters the user lets train: no mask may be in force.
  void note_trainable();
  // Sets every parameter's `.grad` aside, so that the step adds into a buffer of its own.
  void begin_step();
  // Adds the step's gradients, each times its factor, to what was set aside.
  void commit_step(const std::vector<double>& factors);
  // Forgets the step's gradients. Either this or `commit_step` ends a step.
  void abort_step();

 private:
  PyRef forward_;
  PyRef encode_;
  std::vector<at::Tensor> parameters_;
  std::unordered_set<const c10::TensorImpl*> owned_;
  std::vector<bool> trainable_;
  std::vector<at::Tensor> set_aside_;
};

// While it lives, the parameters that `live` (a row of bytes, one a parameter; null: all) leaves out do not require
// grad. Set before forward, so that autograd records nothing for them, and again in backward, where checkpointed
// regions run their forward once more.
class MaskGuard {
 public:
  MaskGuard(const Stage& stage, const uint8_t* live);
  ~MaskGuard();
  MaskGuard(const MaskGuard&) = delete;
  MaskGuard& operator=(const MaskGuard&) = delete;

 private:
  const Stage& stage_;
  const uint8_t* live_;
};

}  // namespace timelyfreeze
