#pragma once
// What the CUDA kernels share. nvcc compiles them for GPUs; any C++20 compiler compiles them for the CPU
// (kernels/simt).
#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "kernels/simt/cuda.h"
#endif

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "kernels/cuda/tuning.h"
#include "kernels/types.h"

namespace timelyfreeze::kernels {

inline constexpr int kWarpThreads = 32;

// ---- elements and packs of them ----

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }

__device__ inline void assign(float& element, float value) { element = value; }
__device__ inline void assign(__nv_bfloat16& element, float value) { element = __float2bfloat16_rn(value); }
__device__ inline void assign(__half& element, float value) { element = __float2half_rn(value); }

// Elements of one kPackBytes access.
template <typename T>
inline constexpr int kPackSize = tuning::kPackBytes / sizeof(T);

// N elements behind each other, which one thread moves at once (in accesses of at most kPackBytes).
template <typename T, int N>
struct alignas(std::min<size_t>(sizeof(T) * N, tuning::kPackBytes)) Pack {
  T elements[N];

  __device__ float operator[](int k) const { return to_float(elements[k]); }
  __device__ void set(int k, float value) { assign(elements[k], value); }
};

// Null where the array is.
template <typename T, typename Void>
__device__ T* element_at(Void* array, int64_t index) {
  return array == nullptr ? nullptr : static_cast<T*>(array) + index;
}

// The pack of `array` that begins at element `index`.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> load(const T* array, int64_t index) {
  return *reinterpret_cast<const Pack<T, N>*>(array + index);
}

// Word by word through the intrinsic: a plain assignment is at times taken apart into elements.
template <int N, typename T>
__device__ __forceinline__ void store(T* array, int64_t index, const Pack<T, N>& pack) {
  using Short = std::conditional_t<sizeof(pack) == 4, unsigned int, unsigned short>;
  using Word = std::conditional_t<alignof(Pack<T, N>) == 16, uint4, Short>;
  auto* to = reinterpret_cast<Word*>(array + index);
  const auto* from = reinterpret_cast<const Word*>(pack.elements);
#pragma unroll
  for (size_t i = 0; i < sizeof(pack) / sizeof(Word); ++i) __stwb(to + i, from[i]);
}

// body(k) for k = 0 .. N - 1, unrolled.
template <int N, typename Body>
__device__ __forceinline__ void for_each(const Body& body) {
#pragma unroll
  for (int k = 0; k < N; ++k) body(k);
}

template <int N, typename T>
__device__ Pack<float, N> load_floats(const void* array, int64_t index) {
  const Pack<T, N> pack = load<N>(static_cast<const T*>(array), index);
  Pack<float, N> floats;
  for_each<N>([&](int k) { floats.set(k, pack[k]); });
  return floats;
}

// The same where the array's type is known only now, and of an array that is `otherwise` throughout where it is null.
// All threads take one branch.
template <int N>
__device__ Pack<float, N> load_floats(const void* array, DType dtype, int64_t index, float otherwise) {
  Pack<float, N> floats;
  for_each<N>([&](int k) { floats.set(k, otherwise); });
  if (array == nullptr) return floats;
  switch (dtype) {
    case DType::bf16:
      return load_floats<N, __nv_bfloat16>(array, index);
    case DType::f16:
      return load_floats<N, __half>(array, index);
    default:
      return load_floats<N, float>(array, index);
  }
}

// ---- rows: blockDim.x threads share one, blockDim.y rows share a block ----

// Calls use(i, slot) for each pack i of this thread. The first kKept packs have a slot of their own, known when
// compiling, so that what is kept of them stays in registers; later ones have slot -1.
template <int kKept, typename Use>
__device__ __forceinline__ void for_each_pack(int num_packs, const Use& use) {
  int i = threadIdx.x;
#pragma unroll
  for (int slot = 0; slot < kKept; ++slot, i += blockDim.x) {
    if (i < num_packs) use(i, slot);
  }
#pragma unroll 1  // rare: no registers for it
  for (; i < num_packs; i += blockDim.x) use(i, -1);
}

struct Sum {
  static constexpr float kNeutral = 0.0f;
  __device__ float operator()(float a, float b) const { return a + b; }
};

struct Max {
  static constexpr float kNeutral = -3.402823466e+38f;  // the lowest finite float
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Combines values over the threads of each row, in one fixed order; every thread of the row gets the result. All
// threads of a block call it alike. Two scratch rows take turns, so one barrier per call is enough: whoever writes a
// scratch row again has passed the barrier of the call between, and so has everyone who read it.
class RowReducer {
 public:
  template <typename Op, int kCount>
  __device__ void reduce(float (&values)[kCount]) {
    for (float& value : values) value = over_warp<Op>(value);
    if (blockDim.x == kWarpThreads) return;
    __shared__ float scratch[2][kCount][kWarpThreads];
    const int lane = threadIdx.x % kWarpThreads;
    const int num_warps = blockDim.x / kWarpThreads;
    float (&turn)[kCount][kWarpThreads] = scratch[turn_];
    turn_ ^= 1;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (lane == 0) turn[i][threadIdx.x / kWarpThreads] = values[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = over_warp<Op>(lane < num_warps ? turn[i][lane] : Op::kNeutral);
  }

 private:
  template <typename Op>
  __device__ static float over_warp(float value) {
#pragma unroll
    for (int offset = kWarpThreads / 2; offset > 0; offset /= 2) {
      value = Op()(value, __shfl_xor_sync(0xffffffffu, value, offset));
    }
    return value;
  }

  int turn_ = 0;
};

__device__ inline int64_t first_row() { return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y; }
__device__ inline int64_t row_step() { return static_cast<int64_t>(gridDim.x) * blockDim.y; }

// ---- launching ----

inline int64_t divide_up(int64_t count, int64_t by) { return (count + by - 1) / by; }

// How many rows a block takes at once, and with how many threads each (whole warps).
struct RowBlock {
  int threads = kWarpThreads;
  int rows = 1;

  RowBlock(int64_t wanted_threads, int max_threads)
      : threads(static_cast<int>(
            std::clamp<int64_t>(divide_up(wanted_threads, kWarpThreads) * kWarpThreads, kWarpThreads, max_threads))),
        rows(threads == kWarpThreads ? tuning::kNarrowRowsPerBlock : 1) {}

  [[nodiscard]] dim3 block() const { return dim3(threads, rows); }
  [[nodiscard]] dim3 grid(int64_t num_rows, int64_t max_blocks = tuning::kMaxBlocks) const {
    return dim3(static_cast<unsigned>(std::min(divide_up(num_rows, rows), max_blocks)));
  }
};

// Whether every array begins at a multiple of kPackBytes; null counts as such.
inline bool aligned(std::initializer_list<const void*> arrays) {
  return std::all_of(arrays.begin(), arrays.end(),
                     [](const void* array) { return reinterpret_cast<uintptr_t>(array) % tuning::kPackBytes == 0; });
}

// Calls use<T>() with the elements' type.
template <typename Use>
void with_type(DType dtype, const Use& use) {
  switch (dtype) {
    case DType::f32:
      return use.template operator()<float>();
    case DType::bf16:
      return use.template operator()<__nv_bfloat16>();
    case DType::f16:
      return use.template operator()<__half>();
    case DType::f64:
      break;
  }
  throw std::invalid_argument("CUDA kernels: expected float32, bfloat16 or float16, got float64. Run it on the CPU.");
}

// Calls use<T, N>() with the elements' type and how many an access takes: kPackBytes full where every array is
// `aligned` and `step`, from row to row, keeps it so; else one.
template <typename Use>
void with_pack(DType dtype, bool aligned, int64_t step, const Use& use) {
  with_type(dtype, [&]<typename T>() {
    if (aligned && step % kPackSize<T> == 0) {
      use.template operator()<T, kPackSize<T>>();
    } else {
      use.template operator()<T, 1>();
    }
  });
}

// Kernels count the elements of one row in 32 bits, a block's step beyond its end included; rows and all else in 64.
inline void check_row(int64_t cols) {
  if (cols >= int64_t{1} << 30) {
    throw std::invalid_argument("CUDA kernels: expected rows of fewer than 2^30 elements, got " + std::to_string(cols) +
                                ".");
  }
}

#ifdef __CUDACC__
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Stream stream, Arguments... arguments) {
  kernel<<<grid, block, 0, stream>>>(arguments...);
}
#else
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, Stream, Arguments... arguments) {
  simt::run(grid, block, [=] { kernel(arguments...); });
}
#endif

}  // namespace timelyfreeze::kernels
