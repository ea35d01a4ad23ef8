#include "runtime/stage_run.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>
#include <utility>

namespace py = pybind11;

namespace timelyfreeze {

bool can_require_grad(const at::Tensor& tensor) {
  return tensor.defined() && (tensor.is_floating_point() || tensor.is_complex());
}

void run_backward(const std::vector<at::Tensor>& roots, const std::vector<at::Tensor>& grads) {
  try {
    torch::autograd::backward(roots, grads, /*retain_graph=*/false, /*create_graph=*/false);
  } catch (const python_error&) {
    // The engine also leaves the error set on this thread, where it would come up again in the next call into Python.
    const py::gil_scoped_acquire gil;
    PyErr_Clear();
    throw;
  }
}

std::vector<bool> keep_outputs(Value& value, bool carries_grad, Held& held) {
  std::vector<bool> flags;
  held.outputs.resize(value.tensors.size());
  for (size_t i = 0; i < value.tensors.size(); ++i) {
    at::Tensor& tensor = value.tensors[i];
    flags.push_back(carries_grad && tensor.requires_grad());
    if (flags.back()) held.outputs[i] = tensor;
    tensor = tensor.detach();
  }
  return flags;
}

py::object call_loss(const py::object& loss_fn, py::object output, const py::object& target) {
  PyObject* arguments[] = {output.ptr(), target.ptr()};
  PyObject* loss = PyObject_Vectorcall(loss_fn.ptr(), arguments, 2, nullptr);
  if (loss == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(loss);
}

StageLoss split_loss(const py::object& loss) {
  py::object value = loss;
  py::object count;
  if (PyTuple_Check(loss.ptr()) && PyTuple_GET_SIZE(loss.ptr()) == 2) {
    value = loss.cast<py::tuple>()[0];
    count = loss.cast<py::tuple>()[1];
  }
  if (!THPVariable_Check(value.ptr()) || THPVariable_Unpack(value.ptr()).numel() != 1) {
    throw py::type_error("the loss: expected a tensor with one element, or a tuple (sum, count), got " +
                         py::repr(py::type::of(loss)).cast<std::string>() +
                         ". Return a scalar from loss_fn, such as the mean over the samples.");
  }
  return {THPVariable_Unpack(value.ptr()), std::move(count)};
}

void throw_constant_loss() {
  throw py::value_error(
      "the loss does not depend on any trainable parameter. Check that loss_fn uses the model's output and that "
      "nothing on the way detaches it.");
}

}  // namespace timelyfreeze
