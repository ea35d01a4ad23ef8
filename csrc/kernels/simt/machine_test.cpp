#include "kernels/cuda/common.cuh"
#include "kernels/simt/testing.h"

// The machine itself: right kernels give the same in both orders of threads, and a race shows.
namespace timelyfreeze::kernels::testing {
namespace {

// Reverses 64 elements a block by way of shared memory; a barrier belongs between the two halves.
template <bool kBarrier>
__global__ void reverse_kernel(const float* in, float* out) {
  __shared__ float elements[64];
  elements[threadIdx.x] = in[blockIdx.x * 64 + threadIdx.x];
  if (kBarrier) __syncthreads();
  out[blockIdx.x * 64 + threadIdx.x] = elements[63 - threadIdx.x];
}

// Each lane's sum over its warp; the second of two exchanges must not overtake the first.
__global__ void lanes_kernel(const float* in, float* out) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const float neighbour = __shfl_xor_sync(0xffffffffu, in[i], 1);
  out[i] = __shfl_xor_sync(0xffffffffu, neighbour, 2);
}

std::vector<unsigned char> run_in(simt::Order order, void (*kernel)(const float*, float*), Array& in, Array& out) {
  simt::Machine::instance().order = order;
  out.clear();
  launch(kernel, dim3(2), dim3(64), nullptr, in.as<float>(), out.as<float>());
  return out.bytes();
}

}  // namespace

void test_machine() {
  Array in(DType::f32, 128), out(DType::f32, 128);
  for (int64_t i = 0; i < 128; ++i) in.set(i, static_cast<double>(i));
  for (const simt::Order order : {simt::Order::ascending, simt::Order::descending}) {
    run_in(order, &reverse_kernel<true>, in, out);
    for (int64_t i = 0; i < 128; ++i) CHECK(out[i] == in[i / 64 * 64 + 63 - i % 64]);
    run_in(order, &lanes_kernel, in, out);
    for (int64_t i = 0; i < 128; ++i) CHECK(out[i] == in[i ^ 3]);
  }
  const auto ascending = run_in(simt::Order::ascending, &reverse_kernel<false>, in, out);
  CHECK(ascending != run_in(simt::Order::descending, &reverse_kernel<false>, in, out));
}

}  // namespace timelyfreeze::kernels::testing
