#include "kernels/activation.h"

#include <algorithm>

#include "kernels/cpu/vec.h"

namespace timelyfreeze::kernels {
namespace {

// Each gives a(x), and writes a'(x) where asked.
struct Silu {
  template <class V>
  V operator()(const V& x, V* slope = nullptr) const {
    const auto s = sigmoid(x);
    const V value = x * s.value;
    if (slope != nullptr) *slope = at::vec::fmadd(value, s.complement, s.value);
    return value;
  }
};

struct Gelu {
  template <class V>
  V operator()(const V& x, V* slope = nullptr) const {
    const Normal<V> at_x = normal(x);
    if (slope != nullptr) *slope = at::vec::fmadd(x, at_x.density, at_x.probability);
    return x * at_x.probability;
  }
};

// (1 + tanh u) / 2 = sigmoid(2 u), by powers of 2: the constants have the factor of log(2) already.
struct GeluTanh {
  template <class V>
  V operator()(const V& x, V* slope = nullptr) const {
    constexpr double linear = -2.302208198144325;  // -2 sqrt(2 / pi) / log(2)
    constexpr double cubic = 0.044715 * linear;
    constexpr double twice_root = 1.5957691216057308;  // 2 sqrt(2 / pi)
    const V square = x * x;
    const auto s = sigmoid_by_powers_of_2(x * at::vec::fmadd(square, V(cubic), V(linear)));
    if (slope != nullptr) {
      const V inner_slope = x * at::vec::fmadd(square, V(3 * 0.044715 * twice_root), V(twice_root));
      *slope = at::vec::fmadd(inner_slope * s.complement, s.value, s.value);
    }
    return x * s.value;
  }
};

template <class Body>
void with_activation(Activation activation, const Body& body) {
  switch (activation) {
    case Activation::silu:
      return body(Silu{});
    case Activation::gelu:
      return body(Gelu{});
    case Activation::gelu_tanh:
      return body(GeluTanh{});
  }
}

// Calls body(input_at, output_at, count) for the parts of rows that make up outputs [begin, end).
template <class Body>
void for_each_part(const ActivationShape& shape, int64_t begin, int64_t end, const Body& body) {
  if (!shape.gated) return body(begin, begin, end - begin);
  while (begin < end) {
    const int64_t row = begin / shape.cols;
    const int64_t count = std::min(end, (row + 1) * shape.cols) - begin;
    body(begin + row * shape.cols, begin, count);
    begin += count;
  }
}

template <class T, class Function>
void forward(const ActivationShape& shape, const T* x, T* y, int64_t begin, int64_t end, const Function& function) {
  using V = Vec<T>;
  for_each_part(shape, begin, end, [&](int64_t input_at, int64_t output_at, int64_t count) {
    const T* gate = x + input_at;
    const T* up = shape.gated ? gate + shape.cols : nullptr;
    T* out = y + output_at;
    for_each_vector<T>(count, [&](int64_t i, auto n) {
      V value = function(load(gate + i, n));
      prefetch(gate + i);
      if (up != nullptr) {
        value = value * load(up + i, n);
        prefetch(up + i);
      }
      store(out + i, value, n);
    });
  });
}

template <class T, class Function>
void backward(const ActivationShape& shape, const T* x, const T* dy, T* dx, int64_t begin, int64_t end,
              const Function& function) {
  using V = Vec<T>;
  for_each_part(shape, begin, end, [&](int64_t input_at, int64_t output_at, int64_t count) {
    const T* gate = x + input_at;
    const T* up = shape.gated ? gate + shape.cols : nullptr;
    const T* gradient = dy + output_at;
    T* dgate = dx + input_at;
    T* dup = dgate + shape.cols;
    for_each_vector<T>(count, [&](int64_t i, auto n) {
      V slope;
      const V value = function(load(gate + i, n), &slope);
      V g = load(gradient + i, n);
      prefetch(gate + i);
      prefetch(gradient + i);
      if (up != nullptr) {
        prefetch(up + i);
        store(dup + i, g * value, n);
        g = g * load(up + i, n);
      }
      store(dgate + i, g * slope, n);
    });
  });
}

}  // namespace

template <class Set>
void activation_forward_elements(const ActivationShape& shape, const void* x, void* y, int64_t begin, int64_t end) {
  with_dtype(shape.dtype, [&]<class T>(std::type_identity<T>) {
    with_activation(shape.activation, [&](auto function) {
      forward(shape, static_cast<const T*>(x), static_cast<T*>(y), begin, end, function);
    });
  });
}

template <class Set>
void activation_backward_elements(const ActivationShape& shape, const void* x, const void* dy, void* dx, int64_t begin,
                                  int64_t end) {
  with_dtype(shape.dtype, [&]<class T>(std::type_identity<T>) {
    with_activation(shape.activation, [&](auto function) {
      backward(shape, static_cast<const T*>(x), static_cast<const T*>(dy), static_cast<T*>(dx), begin, end, function);
    });
  });
}

template void activation_forward_elements<Compiled>(const ActivationShape&, const void*, void*, int64_t, int64_t);
template void activation_backward_elements<Compiled>(const ActivationShape&, const void*, const void*, void*, int64_t,
                                                     int64_t);

}  // namespace timelyfreeze::kernels
