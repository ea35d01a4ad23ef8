#pragma once
#include <cstddef>
#include <mutex>
#include <string>
#include <unordered_map>

#include "runtime/python_ref.h"

namespace timelyfreeze {

// What puts values from another process together; unpickled once for all that look alike. From any thread.
class SpecCache {
 public:
  // Null for an empty text: the value is the one tensor itself.
  PyRef of(const std::string& text) {
    if (text.empty()) return nullptr;
    {
      const std::lock_guard lock(mutex_);
      const auto known = specs_.find(text);
      if (known != specs_.end()) return known->second;
    }
    namespace py = pybind11;
    const py::gil_scoped_acquire gil;
    PyRef spec = make_ref(py::module_::import("timelyfreeze.runtime.values").attr("spec_from_bytes")(py::bytes(text)));
    const std::lock_guard lock(mutex_);
    if (specs_.size() >= kMaxSpecs) specs_.clear();
    return specs_.try_emplace(text, std::move(spec)).first->second;
  }

 private:
  static constexpr size_t kMaxSpecs = 4096;
  std::mutex mutex_;
  std::unordered_map<std::string, PyRef> specs_;
};

}  // namespace timelyfreeze
