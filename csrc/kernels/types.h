#pragma once
#include <cstdint>

// A CUDA stream as CUDA's own headers declare it; host code can name it without them.
struct CUstream_st;

namespace timelyfreeze::kernels {

using Stream = CUstream_st*;

// What an array holds. Kernels read and write it and compute in float32 (float64 where it is f64, on CPUs alone).
enum class DType : uint8_t { f32, f64, bf16, f16 };

}  // namespace timelyfreeze::kernels
