#include "runtime/errors.h"

#include <torch/csrc/Exceptions.h>

#include "runtime/step.h"

namespace py = pybind11;

namespace timelyfreeze {
namespace {

py::object take_current_error() {
  try {
    throw py::error_already_set();
  } catch (py::error_already_set& error) {
    if (error.trace()) PyException_SetTraceback(error.value().ptr(), error.trace().ptr());
    return error.value();
  }
}

void set_torch_error(const char* name, const c10::Error& error) {
  PyErr_SetString(py::module_::import("torch").attr(name).ptr(), error.what_without_backtrace());
}

// Sets the interpreter's error indicator from a C++ exception.
void set_error(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (py::error_already_set& caught) {
    caught.restore();
  } catch (const py::builtin_exception& caught) {
    caught.set_error();
  } catch (const NonFiniteLoss& caught) {
    PyErr_SetString(PyExc_FloatingPointError,
                    ("the loss of micro-batch " + std::to_string(caught.microbatch) + " is " +
                     std::to_string(caught.loss) + "; the first value that is not finite leaves stage " +
                     std::to_string(caught.first_stage) + (caught.or_below ? " or one below it" : "") +
                     ". Lower the learning rate, or pass check_finite=False to go on all the same.")
                        .c_str());
  } catch (const LostRank& caught) {
    const std::string text = "the connection to rank " + std::to_string(caught.rank) + " broke: " + caught.text;
    const py::object lost = py::module_::import("timelyfreeze.errors").attr("TransportError")(text, caught.rank);
    PyErr_SetObject(py::type::of(lost).ptr(), lost.ptr());
  } catch (const TransportCancelled&) {
    PyErr_SetString(PyExc_RuntimeError, "waiting for other ranks was given up.");
  } catch (python_error& caught) {
    caught.restore();
  } catch (const c10::OutOfMemoryError& caught) {
    set_torch_error("OutOfMemoryError", caught);
  } catch (const c10::IndexError& caught) {
    PyErr_SetString(PyExc_IndexError, caught.what_without_backtrace());
  } catch (const c10::ValueError& caught) {
    PyErr_SetString(PyExc_ValueError, caught.what_without_backtrace());
  } catch (const c10::TypeError& caught) {
    PyErr_SetString(PyExc_TypeError, caught.what_without_backtrace());
  } catch (const c10::NotImplementedError& caught) {
    PyErr_SetString(PyExc_NotImplementedError, caught.what_without_backtrace());
  } catch (const c10::Error& caught) {
    PyErr_SetString(PyExc_RuntimeError, caught.what_without_backtrace());
  } catch (const std::bad_alloc&) {
    PyErr_NoMemory();
  } catch (const std::exception& caught) {
    PyErr_SetString(PyExc_RuntimeError, caught.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "an exception of a foreign type");
  }
}

}  // namespace

py::object to_python(const std::exception_ptr& error) {
  set_error(error);
  return take_current_error();
}

}  // namespace timelyfreeze
