#pragma once
#include <ATen/core/Tensor.h>

#include "kernels/types.h"

namespace timelyfreeze::ops {

// Makes a tensor's CUDA device current while it lives, and knows the stream to launch on; `check` raises what a launch
// reported. In a build without CUDA, it refuses.
class CudaLaunch {
 public:
  explicit CudaLaunch(const at::Tensor& tensor);
  ~CudaLaunch();
  CudaLaunch(const CudaLaunch&) = delete;
  CudaLaunch& operator=(const CudaLaunch&) = delete;

  [[nodiscard]] kernels::Stream stream() const { return stream_; }
  void check() const;

 private:
  kernels::Stream stream_ = nullptr;
  int previous_device_ = -1;
};

}  // namespace timelyfreeze::ops
