#include <cmath>

#include "kernels/cross_entropy.h"
#include "kernels/cuda/common.cuh"

// Formulas, sources and bytes moved: kernels/cross_entropy.h. The sum of exponentials is taken beside the maximum in
// one pass (online softmax, arXiv 1805.02867); a second pass turns logits into their gradients.
namespace timelyfreeze::kernels {
namespace {

// A row as packs that begin at multiples of kPackBytes, with single elements before and behind them, wherever it lies.
template <typename T>
struct PackedRow {
  static constexpr int kSize = kPackSize<T>;
  T* packs;
  int before, num_packs, behind;

  __device__ PackedRow(T* row, int cols) {
    const int to_boundary = static_cast<int>(-reinterpret_cast<uintptr_t>(row) % tuning::kPackBytes / sizeof(T));
    before = min(to_boundary, cols);
    num_packs = (cols - before) / kSize;
    behind = cols - before - num_packs * kSize;
    packs = row + before;
  }

  // Calls use(element, column) for the single element of this thread, if it has one: fewer than 2 kSize <= 16 in all.
  template <typename Use>
  __device__ void for_single(const Use& use) const {
    const int i = threadIdx.x;
    if (i >= before + behind) return;
    const int column = i < before ? i : i + num_packs * kSize;
    use(packs[column - before], column);
  }

  // Calls use(first element of a pack, its column) for the packs of this thread.
  template <typename Use>
  __device__ void for_packs(const Use& use) const {
#pragma unroll 2
    for (int i = threadIdx.x; i < num_packs; i += blockDim.x)
      use(packs + static_cast<int64_t>(i) * kSize, before + i * kSize);
  }
};

// What the loss needs of the logits that one thread has met.
struct Online {
  float max = Max::kNeutral;  // finite, so that logits of -inf add exp(-inf) = 0
  float scaled_sum = 0.0f;    // of exp(logit - max)
  float sum = 0.0f;

  template <int N>
  __device__ void add(const Pack<float, N>& logits) {
    float largest = max;
    for_each<N>([&](int k) { largest = fmaxf(largest, logits[k]); });
    scaled_sum *= expf(max - largest);
    max = largest;
    for_each<N>([&](int k) {
      scaled_sum += expf(logits[k] - max);
      sum += logits[k];
    });
  }
};

// Options as the kernel wants them, in float32.
struct Options {
  int64_t ignore_index;
  float label_smoothing;
  float z_loss;
  bool wants_gradient;
};

// Writes the row's gradients over its logits, or zeros where its target is ignored.
template <typename T>
__device__ void write_gradients(const PackedRow<T>& row, const Options& options, int target, int cols, float lse) {
  constexpr int N = kPackSize<T>;
  const bool ignored = target < 0;
  const float scale = 1.0f + 2.0f * options.z_loss * lse;
  const float everywhere = options.label_smoothing / cols;
  const float at_target = 1.0f - options.label_smoothing;
  const auto gradient = [&](float logit, int column) {
    if (ignored) return 0.0f;
    return expf(logit - lse) * scale - everywhere - (column == target ? at_target : 0.0f);
  };
  row.for_single([&](T& element, int column) { assign(element, gradient(to_float(element), column)); });
  row.for_packs([&](T* pack, int column) {
    const Pack<T, N> logits = load<N>(pack, 0);
    Pack<T, N> out;
    for_each<N>([&](int k) { out.set(k, gradient(logits[k], column + k)); });
    store(pack, 0, out);
  });
}

template <typename T>
__global__ void __launch_bounds__(tuning::kCrossEntropyThreads)
    cross_entropy_kernel(int64_t rows, int cols, Options options, T* logits, const int64_t* targets, float* losses) {
  RowReducer reducer;
  // Each row has a block of its own, or a warp where it is narrow; either way all of its threads take the same turns.
  for (int64_t at = first_row(); at < rows; at += row_step()) {
    const PackedRow<T> row(logits + at * cols, cols);
    const int64_t target = targets[at];
    if (target == options.ignore_index) {
      if (threadIdx.x == 0) losses[at] = 0.0f;
      if (options.wants_gradient) write_gradients(row, options, -1, cols, 0.0f);
      continue;
    }
    const float logit = to_float(logits[at * cols + target]);  // before gradients are written over it
    Online online;
    row.for_single([&](T& element, int) { online.add(Pack<float, 1>{to_float(element)}); });
    row.for_packs([&](T* pack, int) { online.add(load_floats<kPackSize<T>, T>(pack, 0)); });
    float max[1] = {online.max};
    reducer.reduce<Max>(max);
    float sums[2] = {online.scaled_sum * expf(online.max - max[0]), online.sum};
    reducer.reduce<Sum>(sums);
    const float lse = max[0] + logf(sums[0]);
    if (threadIdx.x == 0) {
      float loss = lse - (1.0f - options.label_smoothing) * logit + options.z_loss * lse * lse;
      // Not 0 x inf where a logit is -inf.
      if (options.label_smoothing != 0.0f) loss -= options.label_smoothing * (sums[1] / cols);
      losses[at] = loss;
    }
    if (options.wants_gradient) write_gradients(row, options, static_cast<int>(target), cols, lse);
  }
}

}  // namespace

void cross_entropy_cuda(const CrossEntropyShape& shape, void* logits, const int64_t* target, float* loss,
                        bool wants_gradient, Stream stream) {
  if (shape.rows == 0 || shape.cols == 0) return;
  check_row(shape.cols);
  const Options options{shape.ignore_index, static_cast<float>(shape.label_smoothing), static_cast<float>(shape.z_loss),
                        wants_gradient};
  with_type(shape.dtype, [&]<typename T>() {
    const RowBlock block(divide_up(shape.cols, kPackSize<T>), tuning::kCrossEntropyThreads);
    launch(&cross_entropy_kernel<T>, block.grid(shape.rows), block.block(), stream, shape.rows,
           static_cast<int>(shape.cols), options, static_cast<T*>(logits), target, loss);
  });
}

}  // namespace timelyfreeze::kernels
