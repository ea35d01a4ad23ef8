#include "kernels/norm.h"

#include <cmath>
#include <vector>

#include "kernels/cpu/vec.h"

// A row is read from memory once; further passes find it in the cache.
namespace timelyfreeze::kernels {
namespace {

template <class T, class Pointer>
inline auto* at_row(Pointer* array, int64_t row, int64_t cols) {
  using Element = std::conditional_t<std::is_const_v<Pointer>, const T, T>;
  return array == nullptr ? nullptr : static_cast<Element*>(array) + row * cols;
}

// Weights as the sums need them: the array itself, or a copy of it in another type. Null stays null.
template <class R>
class Weights {
 public:
  Weights(const void* array, DType dtype, int64_t cols) {
    if (array == nullptr) return;
    with_dtype(dtype, [&]<class W>(std::type_identity<W>) {
      const W* weights = static_cast<const W*>(array);
      if constexpr (std::is_same_v<W, R>) {
        data_ = weights;
      } else {
        converted_.assign(weights, weights + cols);
        data_ = converted_.data();
      }
    });
  }
  const R* data() const { return data_; }

 private:
  std::vector<R> converted_;
  const R* data_ = nullptr;
};

template <class T>
void forward(const NormShape& shape, const NormForward& arrays, int64_t begin, int64_t end) {
  using V = Vec<T>;
  using R = Real<T>;
  const int64_t cols = shape.cols;
  const Weights<R> weights(arrays.weight, shape.weight_dtype, cols), biases(arrays.bias, shape.weight_dtype, cols);
  const R* weight = weights.data();
  const R* bias = biases.data();
  for (int64_t row = begin; row < end; ++row) {
    const T* x = at_row<T>(arrays.x, row, cols);
    const T* residual = at_row<T>(arrays.residual, row, cols);
    T* sum = at_row<T>(arrays.h, row, cols);
    const T* h = residual == nullptr ? x : sum;
    const R first = sum_of_vectors<T>(cols, [&](int64_t i, auto n) {
      V value = load(x + i, n);
      if (residual != nullptr) {
        store(sum + i, value + load(residual + i, n), n);
        value = load(sum + i, n);  // with its rounding, as backward finds it
      }
      return shape.centered ? value : value * value;
    });
    const R mean = shape.centered ? first / cols : R(0);
    R squares = first;
    if (shape.centered) {
      squares = sum_of_vectors<T>(cols, [&](int64_t i, auto n) {
        const V distance = load(h + i, n, mean) - V(mean);
        return distance * distance;
      });
    }
    const R rstd = 1 / std::sqrt(squares / cols + static_cast<R>(shape.eps));
    T* y = at_row<T>(arrays.y, row, cols);
    for_each_vector<T>(cols, [&](int64_t i, auto n) {
      V z = (load(h + i, n) - V(mean)) * V(rstd);
      if (weight != nullptr) z = z * load(weight + i, n);
      if (bias != nullptr) z = z + load(bias + i, n);
      store(y + i, z, n);
    });
    if (arrays.mean != nullptr) static_cast<R*>(arrays.mean)[row] = mean;
    if (arrays.rstd != nullptr) static_cast<R*>(arrays.rstd)[row] = rstd;
  }
}

// Rows [begin, end): dx, and what they add to `dweight` and `dbias` [cols].
template <class T>
void backward(const NormShape& shape, const NormBackward& arrays, Real<T>* dweight, Real<T>* dbias, int64_t begin,
              int64_t end) {
  using V = Vec<T>;
  using R = Real<T>;
  const int64_t cols = shape.cols;
  const Weights<R> weights(arrays.weight, shape.weight_dtype, cols);
  const R* weight = weights.data();
  for (int64_t row = begin; row < end; ++row) {
    const T* dy = at_row<T>(arrays.dy, row, cols);
    const T* h = at_row<T>(arrays.h, row, cols);
    const V mean(shape.centered ? static_cast<const R*>(arrays.mean)[row] : R(0));
    const R r = static_cast<const R*>(arrays.rstd)[row];
    const V rstd(r);
    const auto from_mean = [&](int64_t i, auto n) { return load(h + i, n) - mean; };
    const auto g = [&](int64_t i, auto n) {
      const V gradient = load(dy + i, n);
      return weight == nullptr ? gradient : gradient * load(weight + i, n);
    };
    if (dweight != nullptr) {
      for_each_vector<R>(cols, [&](int64_t i, auto n) {
        const V z = from_mean(i, n) * rstd;
        store(dweight + i, at::vec::fmadd(load(dy + i, n), z, load(dweight + i, n)), n);
      });
    }
    if (dbias != nullptr) {
      for_each_vector<R>(cols, [&](int64_t i, auto n) { store(dbias + i, load(dbias + i, n) + load(dy + i, n), n); });
    }
    T* dx = at_row<T>(arrays.dx, row, cols);
    if (dx == nullptr) continue;
    const T* dh = at_row<T>(arrays.dh, row, cols);
    const auto [along_distance, along_ones] = sums_of_vectors<T>(cols, [&](int64_t i, auto n) -> std::array<V, 2> {
      const V gradient = g(i, n);
      return {gradient * from_mean(i, n), gradient};
    });
    const V of_distance(-along_distance / cols * r * r), of_ones(shape.centered ? along_ones / cols : R(0));
    for_each_vector<T>(cols, [&](int64_t i, auto n) {
      const V gradient = at::vec::fmadd(from_mean(i, n), of_distance, g(i, n)) - of_ones;
      store(dx + i, dh == nullptr ? gradient * rstd : at::vec::fmadd(gradient, rstd, load(dh + i, n)), n);
    });
  }
}

}  // namespace

template <class Set>
void norm_forward_rows(const NormShape& shape, const NormForward& arrays, int64_t begin, int64_t end) {
  with_dtype(shape.dtype, [&]<class T>(std::type_identity<T>) { forward<T>(shape, arrays, begin, end); });
}

template <class Set>
void norm_backward_rows(const NormShape& shape, const NormBackward& arrays, int64_t begin, int64_t end) {
  with_dtype(shape.dtype,
             [&]<class T>(std::type_identity<T>) { backward<T>(shape, arrays, nullptr, nullptr, begin, end); });
}

template <class Set>
void norm_backward_partials(const NormShape& shape, const NormBackward& arrays, int64_t begin, int64_t end) {
  with_dtype(shape.dtype, [&]<class T>(std::type_identity<T>) {
    using R = Real<T>;
    for (int64_t partial = begin; partial < end; ++partial) {
      R* dweight = at_row<R>(arrays.dweight, partial, shape.cols);
      R* dbias = at_row<R>(arrays.dbias, partial, shape.cols);
      if (dweight != nullptr) std::fill_n(dweight, shape.cols, R(0));
      if (dbias != nullptr) std::fill_n(dbias, shape.cols, R(0));
      backward<T>(shape, arrays, dweight, dbias, partial * shape.rows / arrays.num_partials,
                  (partial + 1) * shape.rows / arrays.num_partials);
    }
  });
}

template void norm_forward_rows<Compiled>(const NormShape&, const NormForward&, int64_t, int64_t);
template void norm_backward_rows<Compiled>(const NormShape&, const NormBackward&, int64_t, int64_t);
template void norm_backward_partials<Compiled>(const NormShape&, const NormBackward&, int64_t, int64_t);

}  // namespace timelyfreeze::kernels
