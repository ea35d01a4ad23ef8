#include "kernels/cuda/common.cuh"
#include "kernels/norm.h"

// Formulas, sources and bytes moved: kernels/norm.h. A row's first kNormElements of each thread stay in registers from
// the sums to the result; only what lies beyond is read again.
namespace timelyfreeze::kernels {
namespace {

// Packs of a row in each thread's registers.
template <int N, int kElements>
constexpr int kKept = kElements / (N > 1 ? N : 4);

// rstd comes from a second pass over the row, about its mean, as in the formula: no cancellation.
template <typename T, int N>
__global__ void __launch_bounds__(tuning::kNormThreads)
    norm_forward_kernel(NormShape shape, NormForward arrays, float eps) {
  constexpr int kPacks = kKept<N, tuning::kNormElements>;
  const int num_packs = static_cast<int>(shape.cols / N);
  RowReducer reducer;
  for (int64_t row = first_row(); row < shape.rows; row += row_step()) {
    const int64_t begin = row * shape.cols;
    const T* x = element_at<const T>(arrays.x, begin);
    const T* residual = element_at<const T>(arrays.residual, begin);
    T* h = element_at<T>(arrays.h, begin);
    T* y = element_at<T>(arrays.y, begin);
    Pack<T, N> kept[kPacks];
    float sum[1] = {0.0f};
    for_each_pack<kPacks>(num_packs, [&](int i, int slot) {
      Pack<T, N> pack = load<N>(x, i * N);
      if (residual != nullptr) {
        const Pack<T, N> added = load<N>(residual, i * N);
        for_each<N>([&](int k) { pack.set(k, pack[k] + added[k]); });
        store(h, i * N, pack);
      }
      if (slot >= 0) kept[slot] = pack;
      for_each<N>([&](int k) { sum[0] += shape.centered ? pack[k] : pack[k] * pack[k]; });
    });
    reducer.reduce<Sum>(sum);

    // What this thread wrote to h it reads back itself, so that needs no barrier.
    const T* wide = residual != nullptr ? h : x;
    float mean = 0.0f;
    if (shape.centered) {
      mean = sum[0] / shape.cols;
      sum[0] = 0.0f;
      for_each_pack<kPacks>(num_packs, [&](int i, int slot) {
        const Pack<T, N> pack = slot >= 0 ? kept[slot] : load<N>(wide, i * N);
        for_each<N>([&](int k) { sum[0] += (pack[k] - mean) * (pack[k] - mean); });
      });
      reducer.reduce<Sum>(sum);
    }
    const float rstd = 1.0f / sqrtf(sum[0] / shape.cols + eps);
    if (threadIdx.x == 0) {
      if (arrays.mean != nullptr) static_cast<float*>(arrays.mean)[row] = mean;
      if (arrays.rstd != nullptr) static_cast<float*>(arrays.rstd)[row] = rstd;
    }
    for_each_pack<kPacks>(num_packs, [&](int i, int slot) {
      const Pack<T, N> pack = slot >= 0 ? kept[slot] : load<N>(wide, i * N);
      const auto weight = load_floats<N>(arrays.weight, shape.weight_dtype, i * N, 1.0f);
      const auto bias = load_floats<N>(arrays.bias, shape.weight_dtype, i * N, 0.0f);
      Pack<T, N> out;
      for_each<N>([&](int k) { out.set(k, (pack[k] - mean) * rstd * weight[k] + bias[k]); });
      store(y, i * N, out);
    });
  }
}

// A thread's share of the sums over rows for one array of weights: kept packs in registers, later ones in the partial
// sum itself.
template <int N, int kPacks>
class WeightGradient {
 public:
  __device__ WeightGradient(void* partials, int64_t partial, int64_t cols)
      : out_(element_at<float>(partials, partial * cols)) {}

  // `first`: nothing has been added yet.
  __device__ void add(int i, int slot, const Pack<float, N>& pack, bool first) {
    if (out_ == nullptr) return;
    if (slot >= 0) {
      for_each<N>([&](int k) { kept_[slot].elements[k] += pack[k]; });
    } else {
      Pack<float, N> sum = first ? Pack<float, N>{} : load<N>(out_, i * N);
      for_each<N>([&](int k) { sum.elements[k] += pack[k]; });
      store(out_, i * N, sum);
    }
  }

  __device__ void write(int num_packs) const {
    if (out_ == nullptr) return;
    for_each_pack<kPacks>(num_packs, [&](int i, int slot) {
      if (slot >= 0) store(out_, i * N, kept_[slot]);
    });
  }

 private:
  float* out_;
  Pack<float, N> kept_[kPacks] = {};
};

// Where weights are frozen nothing of them is kept or added.
template <int N, int kPacks>
struct NoWeightGradient {
  __device__ NoWeightGradient(void*, int64_t, int64_t) {}
  __device__ void add(int, int, const Pack<float, N>&, bool) {}
  __device__ void write(int) const {}
};

// One row of threads is one partial sum: that of rows first_row(), + row_step(), ...
template <typename T, int N, bool kTrainable>
__global__ void __launch_bounds__(kTrainable ? tuning::kNormTrainableThreads : tuning::kNormThreads)
    norm_backward_kernel(NormShape shape, NormBackward arrays) {
  constexpr int kElements = kTrainable ? tuning::kNormTrainableElements : tuning::kNormElements;
  constexpr int kPacks = kKept<N, kElements>;
  using Gradient = std::conditional_t<kTrainable, WeightGradient<N, kPacks>, NoWeightGradient<N, kPacks>>;
  const int num_packs = static_cast<int>(shape.cols / N);
  Gradient dweight(arrays.dweight, first_row(), shape.cols);
  Gradient dbias(arrays.dbias, first_row(), shape.cols);
  RowReducer reducer;
  for (int64_t row = first_row(); row < shape.rows; row += row_step()) {
    const int64_t begin = row * shape.cols;
    const T* h = element_at<const T>(arrays.h, begin);
    const T* dy = element_at<const T>(arrays.dy, begin);
    const T* dh = element_at<const T>(arrays.dh, begin);
    T* dx = element_at<T>(arrays.dx, begin);
    const float rstd = static_cast<const float*>(arrays.rstd)[row];
    const float mean = shape.centered ? static_cast<const float*>(arrays.mean)[row] : 0.0f;
    Pack<T, N> kept_h[kPacks], kept_dy[kPacks];
    float sums[2] = {0.0f, 0.0f};  // of g z and of g
    for_each_pack<kPacks>(num_packs, [&](int i, int slot) {
      const Pack<T, N> input = load<N>(h, i * N);
      const Pack<T, N> gradient = load<N>(dy, i * N);
      const auto weight = load_floats<N>(arrays.weight, shape.weight_dtype, i * N, 1.0f);
      Pack<float, N> of_weight, of_bias;
      for_each<N>([&](int k) {
        const float z = (input[k] - mean) * rstd;
        of_bias.set(k, gradient[k]);
        of_weight.set(k, gradient[k] * z);
        sums[0] += of_weight[k] * weight[k];
        sums[1] += of_bias[k] * weight[k];
      });
      dweight.add(i, slot, of_weight, row == first_row());
      dbias.add(i, slot, of_bias, row == first_row());
      if (slot >= 0) {
        kept_h[slot] = input;
        kept_dy[slot] = gradient;
      }
    });
    if (dx == nullptr) continue;
    reducer.reduce<Sum>(sums);
    const float along_z = sums[0] / shape.cols;
    const float along_one = shape.centered ? sums[1] / shape.cols : 0.0f;
    for_each_pack<kPacks>(num_packs, [&](int i, int slot) {
      const Pack<T, N> input = slot >= 0 ? kept_h[slot] : load<N>(h, i * N);
      const Pack<T, N> gradient = slot >= 0 ? kept_dy[slot] : load<N>(dy, i * N);
      const auto weight = load_floats<N>(arrays.weight, shape.weight_dtype, i * N, 1.0f);
      Pack<float, N> added = {};
      if (dh != nullptr) added = load_floats<N, T>(dh, i * N);
      Pack<T, N> out;
      for_each<N>([&](int k) {
        const float z = (input[k] - mean) * rstd;
        out.set(k, rstd * (gradient[k] * weight[k] - z * along_z - along_one) + added[k]);
      });
      store(dx, i * N, out);
    });
  }
  if (first_row() < shape.rows) {
    dweight.write(num_packs);
    dbias.write(num_packs);
  }
}

// These are the same for every alignment, so that the number of partial sums depends on the shape alone.
RowBlock row_block(const NormShape& shape) {
  return RowBlock(divide_up(shape.cols, tuning::kNormElements), tuning::kNormThreads);
}
RowBlock trainable_row_block(const NormShape& shape) {
  return RowBlock(divide_up(shape.cols, tuning::kNormTrainableElements), tuning::kNormTrainableThreads);
}

}  // namespace

int64_t norm_num_partials_cuda(const NormShape& shape) {
  return std::min(shape.rows, tuning::kNormPartialBlocks * trainable_row_block(shape).rows);
}

void norm_forward_cuda(const NormShape& shape, const NormForward& arrays, Stream stream) {
  if (shape.rows == 0 || shape.cols == 0) return;
  check_row(shape.cols);
  const bool wide = aligned({arrays.x, arrays.residual, arrays.weight, arrays.bias, arrays.h, arrays.y});
  with_pack(shape.dtype, wide, shape.cols, [&]<typename T, int N>() {
    const RowBlock block = row_block(shape);
    launch(&norm_forward_kernel<T, N>, block.grid(shape.rows), block.block(), stream, shape, arrays,
           static_cast<float>(shape.eps));
  });
}

void norm_backward_cuda(const NormShape& shape, const NormBackward& arrays, Stream stream) {
  if (shape.rows == 0 || shape.cols == 0) return;
  check_row(shape.cols);
  const bool wide = aligned({arrays.dy, arrays.dh, arrays.h, arrays.weight, arrays.dx, arrays.dweight, arrays.dbias});
  with_pack(shape.dtype, wide, shape.cols, [&]<typename T, int N>() {
    if (arrays.dweight == nullptr && arrays.dbias == nullptr) {
      const RowBlock block = row_block(shape);
      launch(&norm_backward_kernel<T, N, false>, block.grid(shape.rows), block.block(), stream, shape, arrays);
    } else {
      const RowBlock block = trainable_row_block(shape);
      const dim3 grid = block.grid(shape.rows, tuning::kNormPartialBlocks);
      launch(&norm_backward_kernel<T, N, true>, grid, block.block(), stream, shape, arrays);
    }
  });
}

}  // namespace timelyfreeze::kernels
