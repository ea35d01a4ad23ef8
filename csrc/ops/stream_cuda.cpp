// Launching on torch's current stream of a device; compiled in CUDA builds.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "ops/stream.h"

namespace timelyfreeze::ops {

CudaLaunch::CudaLaunch(const at::Tensor& tensor) : previous_device_(c10::cuda::current_device()) {
  c10::cuda::set_device(tensor.device().index());
  stream_ = c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

CudaLaunch::~CudaLaunch() {
  // As c10's own guards: what fails here has been reported by what failed before.
  C10_CUDA_CHECK_WARN(cudaSetDevice(previous_device_));
}

void CudaLaunch::check() const { C10_CUDA_KERNEL_LAUNCH_CHECK(); }

}  // namespace timelyfreeze::ops
