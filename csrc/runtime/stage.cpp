#include "runtime/stage.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/add.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>

namespace py = pybind11;

namespace timelyfreeze {

at::Tensor require_input_grad(const at::Tensor& tensor, NodePtr& node) {
  at::Tensor input = tensor.detach();
  node = make_node<InputGrad>();
  const auto index = node->add_input_metadata(input);
  torch::autograd::impl::set_gradient_edge(input, torch::autograd::Edge(node, index));
  return input;
}

Stage::Stage(py::object forward, py::object encode, std::vector<at::Tensor> parameters)
    : forward_(make_ref(std::move(forward))),
      encode_(make_ref(std::move(encode))),
      parameters_(std::move(parameters)),
      trainable_(parameters_.size()),
      set_aside_(parameters_.size()) {
  for (const at::Tensor& parameter : parameters_) owned_.insert(parameter.unsafeGetTensorImpl());
}

py::object Stage::call(const Value& input, const py::object& extra) const {
  const bool has_extra = !extra.is_none();
  if (input.spec) {
    const py::object call = input.spec->attr("call");
    return has_extra ? call(*forward_, input.tensors, extra) : call(*forward_, input.tensors);
  }
  const py::object tensor = py::cast(input.tensors.at(0));
  PyObject* arguments[] = {tensor.ptr(), extra.ptr()};
  PyObject* result = PyObject_Vectorcall(forward_->ptr(), arguments, has_extra ? 2 : 1, nullptr);
  if (result == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

Value Stage::take_apart(const py::object& object) const {
  if (THPVariable_Check(object.ptr())) return {{THPVariable_Unpack(object.ptr())}, nullptr};
  auto parts = (*encode_)(object).cast<std::pair<std::vector<at::Tensor>, py::object>>();
  return {std::move(parts.first), make_ref(std::move(parts.second))};
}

void Stage::unshare_gradients() const {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& parameter : parameters_) {
    at::Tensor& grad = parameter.mutable_grad();
    if (grad.defined() && grad.has_storage() && grad.storage().use_count() > 1) grad = grad.clone();
  }
}

void Stage::note_trainable() {
  for (size_t i = 0; i < parameters_.size(); ++i) trainable_[i] = parameters_[i].requires_grad();
}

void Stage::begin_step() {
  note_trainable();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    set_aside_[i] = at::Tensor();
    if (trainable_[i]) std::swap(set_aside_[i], parameters_[i].mutable_grad());
  }
}

void Stage::commit_step(const std::vector<double>& factors) {
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (!trainable_[i]) continue;
    at::Tensor& grad = parameters_[i].mutable_grad();
    if (grad.defined() && factors[i] != 1.0) grad.mul_(factors[i]);
    at::Tensor& before = set_aside_[i];
    if (!before.defined()) continue;
    if (grad.defined()) {
      if (before.is_sparse() && !grad.is_sparse()) {
        before = at::add(before, grad);
      } else {
        before.add_(grad);
      }
    }
    grad = std::move(before);
  }
}

void Stage::abort_step() {
  for (size_t i = 0; i < parameters_.size(); ++i) {
    if (trainable_[i]) parameters_[i].mutable_grad() = std::move(set_aside_[i]);
  }
}

MaskGuard::MaskGuard(const Stage& stage, const uint8_t* live) : stage_(stage), live_(live) {
  if (live_ == nullptr) return;
  for (size_t i = 0; i < stage_.parameters().size(); ++i) {
    if (stage_.trainable()[i] && live_[i] == 0) stage_.parameters()[i].set_requires_grad(false);
  }
}

MaskGuard::~MaskGuard() {
  if (live_ == nullptr) return;
  for (size_t i = 0; i < stage_.parameters().size(); ++i) {
    if (stage_.trainable()[i] && live_[i] == 0) stage_.parameters()[i].set_requires_grad(true);
  }
}

}  // namespace timelyfreeze
