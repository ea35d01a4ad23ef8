#pragma once
#include <ATen/autocast_mode.h>

namespace timelyfreeze {

// As autocast would cast for a matrix product; the tensor itself where it is off.
inline at::Tensor autocast_to(const at::Tensor& tensor) {
  const auto device = tensor.device().type();
  if (!at::autocast::is_autocast_enabled(device)) return tensor;
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}

}  // namespace timelyfreeze
