#include "kernels/activation.h"
#include "kernels/cuda/common.cuh"

// Formulas, sources and bytes moved: kernels/activation.h. One thread turns one pack of a row; nothing is shared.
namespace timelyfreeze::kernels {
namespace {

constexpr float kSqrtHalf = 0.70710678118654752f;
constexpr float kInverseSqrtTwoPi = 0.39894228040143268f;
constexpr float kTwoSqrtTwoOverPi = 1.59576912160573071f;  // 2 sqrt(2 / pi)
constexpr float kCubic = 0.044715f;

struct Value {
  float y;
  float slope;
};

// Quick division where the result is rounded to 16 bits, in which its 2 units in the last place vanish.
template <typename T>
__device__ float sigmoid(float x) {
  const float divisor = 1.0f + expf(-x);
  return sizeof(T) == 2 ? __fdividef(1.0f, divisor) : 1.0f / divisor;
}

// a(x) and a'(x); what is not used costs nothing.
template <typename T, Activation kActivation>
__device__ __forceinline__ Value activate(float x) {
  if constexpr (kActivation == Activation::silu) {
    const float s = sigmoid<T>(x);
    return {x * s, s + x * s * (1.0f - s)};
  } else if constexpr (kActivation == Activation::gelu) {
    const float normal = 0.5f * (1.0f + erff(x * kSqrtHalf));  // distribution function of the normal distribution
    return {x * normal, normal + x * kInverseSqrtTwoPi * expf(-0.5f * x * x)};
  } else {
    // (1 + tanh(u)) / 2 is the sigmoid of 2 u.
    const float s = sigmoid<T>(kTwoSqrtTwoOverPi * x * (1.0f + kCubic * x * x));
    const float inner = kTwoSqrtTwoOverPi * (1.0f + 3.0f * kCubic * x * x);
    return {x * s, s + x * s * (1.0f - s) * inner};
  }
}

// Calls use(values) with what activates the type; all threads take one branch.
template <typename T, typename Use>
__device__ __forceinline__ void with_activation(Activation activation, const Use& use) {
  switch (activation) {
    case Activation::silu:
      return use([](float x) { return activate<T, Activation::silu>(x); });
    case Activation::gelu:
      return use([](float x) { return activate<T, Activation::gelu>(x); });
    case Activation::gelu_tanh:
      return use([](float x) { return activate<T, Activation::gelu_tanh>(x); });
  }
}

// Calls use(row, column) for the first element of each pack of this thread.
template <int N, typename Use>
__device__ __forceinline__ void for_each_pack_of(const ActivationShape& shape, const Use& use) {
  const int64_t num_packs = shape.cols / N;
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * blockDim.y + threadIdx.y; row < shape.rows;
       row += static_cast<int64_t>(gridDim.y) * blockDim.y) {
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_packs;
         i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
      use(row, i * N);
    }
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(tuning::kActivationThreads)
    activation_forward_kernel(ActivationShape shape, const T* x, T* y) {
  for_each_pack_of<N>(shape, [&](int64_t row, int64_t column) {
    const int64_t out_index = row * shape.cols + column;
    const int64_t in_index = shape.gated ? out_index + row * shape.cols : out_index;
    const Pack<T, N> gate = load<N>(x, in_index);
    Pack<float, N> up;
    for_each<N>([&](int k) { up.set(k, 1.0f); });
    if (shape.gated) up = load_floats<N, T>(x, in_index + shape.cols);
    Pack<T, N> out;
    with_activation<T>(shape.activation,
                       [&](auto a) { for_each<N>([&](int k) { out.set(k, a(gate[k]).y * up[k]); }); });
    store(y, out_index, out);
  });
}

template <typename T, int N>
__global__ void __launch_bounds__(tuning::kActivationThreads)
    activation_backward_kernel(ActivationShape shape, const T* x, const T* dy, T* dx) {
  for_each_pack_of<N>(shape, [&](int64_t row, int64_t column) {
    const int64_t out_index = row * shape.cols + column;
    const int64_t in_index = shape.gated ? out_index + row * shape.cols : out_index;
    const Pack<T, N> gradient = load<N>(dy, out_index);
    const Pack<T, N> gate = load<N>(x, in_index);
    Pack<float, N> up;
    for_each<N>([&](int k) { up.set(k, 1.0f); });
    if (shape.gated) up = load_floats<N, T>(x, in_index + shape.cols);
    Pack<T, N> of_gate, of_up;
    with_activation<T>(shape.activation, [&](auto a) {
      for_each<N>([&](int k) {
        const Value value = a(gate[k]);
        of_gate.set(k, gradient[k] * up[k] * value.slope);
        of_up.set(k, gradient[k] * value.y);
      });
    });
    store(dx, in_index, of_gate);
    if (shape.gated) store(dx, in_index + shape.cols, of_up);
  });
}

// Blocks are as wide as a row where it is narrow, and then several rows high.
struct Tiles {
  dim3 grid, block;

  Tiles(int64_t rows, int64_t num_packs) {
    unsigned width = 1;
    while (width < num_packs && width < tuning::kActivationThreads) width *= 2;
    block = dim3(width, tuning::kActivationThreads / width);
    grid = dim3(static_cast<unsigned>(std::min(divide_up(num_packs, block.x), tuning::kMaxBlocks)),
                static_cast<unsigned>(std::min(divide_up(rows, block.y), tuning::kMaxBlocks)));
  }
};

// Calls use<T, N>(shape, begin) for parts of the arrays that together are the whole; `begin` in elements. Arrays
// without gates are one long row, whose last few elements are a part of their own.
template <typename Use>
void for_each_part(ActivationShape shape, bool aligned, const Use& use) {
  if (!shape.gated) {
    shape.cols *= shape.rows;
    shape.rows = 1;
  }
  if (shape.rows == 0 || shape.cols == 0) return;
  const int64_t rest = shape.gated ? 0 : shape.cols % tuning::kPackBytes;
  with_pack(shape.dtype, aligned, shape.cols - rest, [&]<typename T, int N>() {
    ActivationShape part = shape;
    part.cols -= rest;
    if (part.cols > 0) use.template operator()<T, N>(part, 0);
    if (rest == 0) return;
    part.cols = rest;
    use.template operator()<T, 1>(part, shape.cols - rest);
  });
}

}  // namespace

void activation_forward_cuda(const ActivationShape& shape, const void* x, void* y, Stream stream) {
  for_each_part(shape, aligned({x, y}), [&]<typename T, int N>(const ActivationShape& part, int64_t begin) {
    const Tiles tiles(part.rows, part.cols / N);
    launch(&activation_forward_kernel<T, N>, tiles.grid, tiles.block, stream, part, static_cast<const T*>(x) + begin,
           static_cast<T*>(y) + begin);
  });
}

void activation_backward_cuda(const ActivationShape& shape, const void* x, const void* dy, void* dx, Stream stream) {
  for_each_part(shape, aligned({x, dy, dx}), [&]<typename T, int N>(const ActivationShape& part, int64_t begin) {
    const Tiles tiles(part.rows, part.cols / N);
    launch(&activation_backward_kernel<T, N>, tiles.grid, tiles.block, stream, part, static_cast<const T*>(x) + begin,
           static_cast<const T*>(dy) + begin, static_cast<T*>(dx) + begin);
  });
}

}  // namespace timelyfreeze::kernels
