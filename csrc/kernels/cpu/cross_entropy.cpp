#include "kernels/cross_entropy.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/vec.h"

namespace timelyfreeze::kernels {
namespace {

constexpr int64_t block_cols = 2048;  // float32 of a block: 8 KiB, which the first level of the cache keeps

template <class R>
struct RowSums {
  R maximum = -std::numeric_limits<R>::infinity();
  R exponentials = 0;  // of logits less the maximum
  R logits = 0;        // only where labels are smoothed
};

// Not-a-number is the larger of any two.
template <class R>
R larger(R a, R b) {
  return std::isnan(a) || a > b ? a : b;
}

// One pass over the row in memory: a block's maximum, then its exponentials while it is in the cache.
template <class T>
RowSums<Real<T>> sum_row(const T* logits, int64_t cols, bool smooth) {
  using V = Vec<T>;
  using R = Real<T>;
  constexpr R lowest = -std::numeric_limits<R>::infinity();
  RowSums<R> sums;
  for (int64_t start = 0; start < cols; start += block_cols) {
    const T* block = logits + start;
    const int64_t count = std::min(block_cols, cols - start);
    V maxima(lowest);
    for_each_vector<T>(count,
                       [&](int64_t i, auto n) { maxima = at::vec::maximum(maxima, load(block + i, n, lowest)); });
    const R maximum = larger(sums.maximum, fold_lanes(maxima, larger<R>));
    if (smooth) sums.logits += sum_of_vectors<T>(count, [&](int64_t i, auto n) { return load(block + i, n); });
    if (maximum == lowest) continue;  // masked from end to end so far: adds nothing
    sums.exponentials *= std::exp(sums.maximum - maximum);
    sums.exponentials +=
        sum_of_vectors<T>(count, [&](int64_t i, auto n) { return exp(load(block + i, n, lowest) - V(maximum)); });
    sums.maximum = maximum;
  }
  return sums;
}

template <class T>
void do_row(const CrossEntropyShape& shape, T* logits, int64_t target, Real<T>* loss, bool wants_gradient) {
  using V = Vec<T>;
  using R = Real<T>;
  const R smoothing = static_cast<R>(shape.label_smoothing), z_loss = static_cast<R>(shape.z_loss);
  const R share = smoothing / shape.cols;
  const RowSums<R> sums = sum_row(logits, shape.cols, smoothing > 0);
  const R log_sum = std::log(sums.exponentials);
  const R lse = sums.maximum + log_sum;
  const R of_target = static_cast<R>(logits[target]);
  // The maximum is taken off first, so that large logits do not cost the loss its digits.
  *loss = log_sum + (sums.maximum - of_target);
  if (smoothing > 0) *loss += smoothing * of_target - share * sums.logits;
  if (z_loss > 0) *loss += z_loss * lse * lse;
  if (!wants_gradient) return;
  const R factor = (1 + 2 * z_loss * lse) / sums.exponentials;
  for_each_vector<T>(shape.cols, [&](int64_t i, auto n) {
    store(logits + i, at::vec::fmadd(exp(load(logits + i, n) - V(sums.maximum)), V(factor), V(-share)), n);
  });
  logits[target] = static_cast<T>(std::exp(of_target - sums.maximum) * factor - share - (1 - smoothing));
}

}  // namespace

template <class Set>
void cross_entropy_rows(const CrossEntropyShape& shape, void* logits, const int64_t* target, void* loss,
                        bool wants_gradient, int64_t begin, int64_t end) {
  with_dtype(shape.dtype, [&]<class T>(std::type_identity<T>) {
    Real<T>* losses = static_cast<Real<T>*>(loss);
    for (int64_t row = begin; row < end; ++row) {
      T* of_row = static_cast<T*>(logits) + row * shape.cols;
      if (target[row] != shape.ignore_index) {
        do_row(shape, of_row, target[row], losses + row, wants_gradient);
      } else {
        losses[row] = 0;
        if (wants_gradient) std::fill_n(of_row, shape.cols, T(0));
      }
    }
  });
}

template void cross_entropy_rows<Compiled>(const CrossEntropyShape&, void*, const int64_t*, void*, bool, int64_t,
                                           int64_t);

}  // namespace timelyfreeze::kernels
