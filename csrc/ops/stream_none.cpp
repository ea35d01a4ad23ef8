// Stands in for the CUDA kernels where the extension was built without them: tensors on a GPU are refused.
#include "kernels/activation.h"
#include "kernels/cross_entropy.h"
#include "kernels/norm.h"
#include "kernels/rope.h"
#include "ops/checks.h"
#include "ops/stream.h"

namespace timelyfreeze {

namespace ops {

CudaLaunch::CudaLaunch(const at::Tensor& tensor) {
  TORCH_CHECK_NOT_IMPLEMENTED(false, "timelyfreeze was built without its CUDA kernels, and got a tensor on ",
                              tensor.device(), ". Install it where nvcc and a CUDA build of torch are found.");
}
CudaLaunch::~CudaLaunch() = default;
void CudaLaunch::check() const {}

}  // namespace ops

namespace kernels {

// None of these is reached: there is no CudaLaunch to take a stream from.
int64_t norm_num_partials_cuda(const NormShape&) { return 1; }
void norm_forward_cuda(const NormShape&, const NormForward&, Stream) {}
void norm_backward_cuda(const NormShape&, const NormBackward&, Stream) {}
void activation_forward_cuda(const ActivationShape&, const void*, void*, Stream) {}
void activation_backward_cuda(const ActivationShape&, const void*, const void*, void*, Stream) {}
void rope_cuda(const RopeShape&, const Heads&, const Heads&, const float*, const float*, Stream) {}
void cross_entropy_cuda(const CrossEntropyShape&, void*, const int64_t*, float*, bool, Stream) {}

}  // namespace kernels

}  // namespace timelyfreeze
