#pragma once
#include <torch/csrc/utils/pybind.h>

#include <memory>

namespace timelyfreeze {

// A Python object that may be let go of on any thread, with or without the interpreter lock.
using PyRef = std::shared_ptr<pybind11::object>;

inline PyRef make_ref(pybind11::object object) {
  return {new pybind11::object(std::move(object)), [](pybind11::object* held) {
            const pybind11::gil_scoped_acquire gil;
            delete held;
          }};
}

}  // namespace timelyfreeze
