#pragma once
#include <exception>

#include "runtime/python_ref.h"

namespace timelyfreeze {

// The Python exception that stands for a C++ one; what came from Python is given back as it was. Needs the
// interpreter lock.
pybind11::object to_python(const std::exception_ptr& error);

}  // namespace timelyfreeze
