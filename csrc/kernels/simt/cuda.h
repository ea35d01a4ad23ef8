#pragma once
// The words of CUDA C++ that the kernels use, for a C++ compiler. Types and conversions are those of NVIDIA's own
// headers.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/simt/machine.h"

#undef __global__
#undef __device__
#undef __shared__
#undef __forceinline__
#undef __launch_bounds__
#define __global__
#define __device__
#define __shared__ static  // of one OS thread that runs one block at a time; AddressSanitizer puts red zones around it
#define __forceinline__ inline
#define __launch_bounds__(...)

#define threadIdx (timelyfreeze::simt::Machine::instance().thread_index())
#define blockIdx (timelyfreeze::simt::Machine::instance().block_index)
#define blockDim (timelyfreeze::simt::Machine::instance().block_dim)
#define gridDim (timelyfreeze::simt::Machine::instance().grid_dim)

// Global, as CUDA has them.
inline void __syncthreads() { timelyfreeze::simt::Machine::instance().barrier(); }

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, unsigned lane_mask) {
  auto& machine = timelyfreeze::simt::Machine::instance();
  const uint3& thread = machine.thread_index();
  const unsigned number = thread.x + machine.block_dim.x * (thread.y + machine.block_dim.y * thread.z);
  return machine.exchange(mask, value, (number % timelyfreeze::simt::Machine::kLanes) ^ lane_mask);
}

template <typename T>
void __stwb(T* address, T value) {
  *address = value;
}

inline float __fdividef(float dividend, float divisor) { return dividend / divisor; }
using std::max;
using std::min;
