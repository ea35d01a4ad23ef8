#pragma once
#include <ATen/TensorOperators.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <initializer_list>
#include <optional>
#include <string>

#include "kernels/types.h"

namespace timelyfreeze::ops {

using Optional = std::optional<at::Tensor>;

inline Optional given(const at::Tensor& tensor) { return tensor.defined() ? Optional(tensor) : std::nullopt; }

// Undefined where there is none.
inline at::Tensor or_undefined(const Optional& tensor) { return tensor.value_or(at::Tensor()); }

inline const void* data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.const_data_ptr() : nullptr;
}

inline void* mutable_data_or_null(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.mutable_data_ptr() : nullptr;
}

inline at::Tensor contiguous_or_undefined(const at::Tensor& tensor) {
  return tensor.defined() ? tensor.contiguous() : tensor;
}

inline kernels::DType dtype_of(const at::Tensor& tensor, const char* op) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kernels::DType::f32;
    case at::kDouble:
      return kernels::DType::f64;
    case at::kBFloat16:
      return kernels::DType::bf16;
    case at::kHalf:
      return kernels::DType::f16;
    default:
      TORCH_CHECK_TYPE(false, op, ": expected float32, float64, bfloat16 or float16, got ",
                       c10::toString(tensor.scalar_type()), ". Cast the tensor first.");
  }
}

// Whether autograd is to record something now.
inline bool records(std::initializer_list<at::Tensor> inputs) {
  return at::GradMode::is_enabled() && std::any_of(inputs.begin(), inputs.end(), [](const at::Tensor& input) {
           return input.defined() && input.requires_grad();
         });
}

template <class Signature>
auto find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// What statistics and losses are kept in.
inline at::ScalarType accumulation_type(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

}  // namespace timelyfreeze::ops
