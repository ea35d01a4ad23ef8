#pragma once
#include <ATen/cpu/vec/vec.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <type_traits>

#include "kernels/cpu/rows.h"

// Vectors of float32, or of float64 where arrays are float64: loads and stores that convert, loops, and exp and the
// normal distribution as inline polynomials (calls into a mathematics library cost more than the memory they save).
namespace timelyfreeze::kernels {

// The instruction set that this object file is compiled for.
#if defined(CPU_CAPABILITY_AVX512)
using Compiled = Avx512;
#elif defined(CPU_CAPABILITY_AVX2)
using Compiled = Avx2;
#else
using Compiled = Plain;
#endif

namespace {

using BFloat16 = c10::BFloat16;
using Half = c10::Half;

// What arrays of T are computed in.
template <class T>
using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;
template <class T>
using Vec = at::vec::Vectorized<Real<T>>;
using VecF = at::vec::Vectorized<float>;
using VecD = at::vec::Vectorized<double>;

template <class T>
constexpr int64_t width = Vec<T>::size();

// Calls body(std::type_identity<T>) for the T that `dtype` names.
template <class Body>
void with_dtype(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::f32:
      return body(std::type_identity<float>{});
    case DType::f64:
      return body(std::type_identity<double>{});
    case DType::bf16:
      return body(std::type_identity<BFloat16>{});
    case DType::f16:
      return body(std::type_identity<Half>{});
  }
}

// Asks for what a stream of reads at `from` will want 16 KiB further on. Processors look ahead within a page of 4 KiB
// only; rows of gate and up, which change pages often, are read up to twice as fast so.
template <class T>
inline void prefetch(const T* from) {
#ifdef __GNUC__
  __builtin_prefetch(reinterpret_cast<const char*>(from) + 16384);
#endif
}

// How many lanes count: all of them, known when compiling, or the first `count`.
template <class T>
using AllLanes = std::integral_constant<int64_t, width<T>>;

// A vector's worth of 16-bit floats, and back.
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#ifdef CPU_CAPABILITY_AVX512
using Register = __m512;
using HalfRegister = __m256i;
#else
using Register = __m256;
using HalfRegister = __m128i;
#endif

template <class T>
inline VecF widen(const T* from) {
  HalfRegister narrow;
  std::memcpy(&narrow, from, sizeof(narrow));
  Register wide;
  at::vec::cvt_to_fp32<T>(narrow, wide);
  return wide;
}

inline void narrow(const VecF& vec, BFloat16* to) {
  const HalfRegister narrow = at::vec::cvtfp32_bf16(vec);
  std::memcpy(to, &narrow, sizeof(narrow));
}

inline void narrow(const VecF& vec, Half* to) {
  const HalfRegister narrow = at::vec::cvtfp32_fp16(vec);
  std::memcpy(to, &narrow, sizeof(narrow));
}
#else
template <class T>
inline VecF widen(const T* from) {
  float lanes[VecF::size()];
  for (int i = 0; i < VecF::size(); ++i) lanes[i] = from[i];
  return VecF::loadu(lanes);
}

template <class T>
inline void narrow(const VecF& vec, T* to) {
  float lanes[VecF::size()];
  vec.store(lanes);
  for (int i = 0; i < VecF::size(); ++i) to[i] = lanes[i];
}
#endif

// Loads put `fill` into the lanes that do not count.
template <class T>
inline Vec<T> load(const T* from, AllLanes<T>, Real<T> = 0) {
  if constexpr (std::is_same_v<T, Real<T>>) {
    return Vec<T>::loadu(from);
  } else {
    return widen(from);
  }
}

template <class T>
inline Vec<T> load(const T* from, int64_t count, Real<T> fill = 0) {
  Real<T> lanes[width<T>];
  for (int64_t i = 0; i < width<T>; ++i) lanes[i] = i < count ? static_cast<Real<T>>(from[i]) : fill;
  return Vec<T>::loadu(lanes);
}

template <class T>
inline void store(T* to, const Vec<T>& vec, AllLanes<T>) {
  if constexpr (std::is_same_v<T, Real<T>>) {
    vec.store(to);
  } else {
    narrow(vec, to);
  }
}

template <class T>
inline void store(T* to, const Vec<T>& vec, int64_t count) {
  Real<T> lanes[width<T>];
  vec.store(lanes);
  for (int64_t i = 0; i < count; ++i) to[i] = static_cast<T>(lanes[i]);
}

// Calls body(i, lanes) for vectors of T at i that cover [0, count).
template <class T, class Body>
inline void for_each_vector(int64_t count, const Body& body) {
  int64_t i = 0;
  for (; i + width<T> <= count; i += width<T>) body(i, AllLanes<T>{});
  if (i < count) body(i, count - i);
}

// Folds a vector's lanes in halves.
template <class V, class Fold>
inline typename V::value_type fold_lanes(const V& vec, const Fold& fold) {
  typename V::value_type lanes[V::size()];
  vec.store(lanes);
  for (int half = V::size() / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = fold(lanes[i], lanes[i + half]);
  }
  return lanes[0];
}

// The sum of value(i, lanes) over [0, count). Four sums side by side hide the latency of an addition; what they hold
// depends on `count` alone.
template <class T, class Value>
inline Real<T> sum_of_vectors(int64_t count, const Value& value) {
  Vec<T> sums[4] = {Vec<T>(0), Vec<T>(0), Vec<T>(0), Vec<T>(0)};
  int64_t i = 0;
  for (; i + 4 * width<T> <= count; i += 4 * width<T>) {
    for (int64_t k = 0; k < 4; ++k) sums[k] = sums[k] + value(i + k * width<T>, AllLanes<T>{});
  }
  for (; i + width<T> <= count; i += width<T>) sums[0] = sums[0] + value(i, AllLanes<T>{});
  if (i < count) sums[1] = sums[1] + value(i, count - i);
  return fold_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]), std::plus<>());
}

// As sum_of_vectors, of pairs of values in one pass.
template <class T, class Values>
inline std::array<Real<T>, 2> sums_of_vectors(int64_t count, const Values& values) {
  Vec<T> sums[2][4];
  for (auto& quarter : sums) std::fill_n(quarter, 4, Vec<T>(0));
  const auto add = [&](int64_t k, const std::array<Vec<T>, 2>& pair) {
    sums[0][k] = sums[0][k] + pair[0];
    sums[1][k] = sums[1][k] + pair[1];
  };
  int64_t i = 0;
  for (; i + 4 * width<T> <= count; i += 4 * width<T>) {
    for (int64_t k = 0; k < 4; ++k) add(k, values(i + k * width<T>, AllLanes<T>{}));
  }
  for (; i + width<T> <= count; i += width<T>) add(0, values(i, AllLanes<T>{}));
  if (i < count) add(1, values(i, count - i));
  const auto total = [](const Vec<T>* s) { return fold_lanes((s[0] + s[1]) + (s[2] + s[3]), std::plus<>()); };
  return {total(sums[0]), total(sums[1])};
}

// e^x within 2 units in the last place: x = n log 2 + r with |r| <= log(2) / 2, and a minimax polynomial of e^r. Below
// -87.3 the result is 0, above 88.4 infinity; not-a-number stays.
inline VecF exp(const VecF& x) {
  constexpr float log2_e = 1.44269504F;
  constexpr float log_2_high = 0.693359375F, log_2_low = -2.12194440e-4F;  // n log_2_high is exact
  constexpr float to_bits = 12583039.0F;  // 1.5 2^23 + 127: adding it leaves n + 127 in the last bits
  const VecF inside = at::vec::clamp(x, VecF(-88.0F), VecF(88.5F));
  const VecF shifted = at::vec::fmadd(inside, VecF(log2_e), VecF(to_bits));
  const VecF n = shifted - VecF(to_bits);
  const VecF r = at::vec::fmadd(n, VecF(-log_2_low), at::vec::fmadd(n, VecF(-log_2_high), inside));
  VecF polynomial = at::vec::fmadd(VecF(1.38145986e-3F), r, VecF(8.36871698e-3F));
  polynomial = at::vec::fmadd(polynomial, r, VecF(4.16683881e-2F));
  polynomial = at::vec::fmadd(polynomial, r, VecF(0.166665206F));
  polynomial = at::vec::fmadd(polynomial, r, VecF(0.499999934F));
  polynomial = at::vec::fmadd(polynomial, r, VecF(1.0F));
  polynomial = at::vec::fmadd(polynomial, r, VecF(1.0F));
  using VecI = at::vec::Vectorized<int32_t>;
  return polynomial * at::vec::cast<float>(at::vec::cast<int32_t>(shifted) << VecI(23));
}

inline VecD exp(const VecD& x) { return x.exp(); }

// 2^x for x <= 126, and that of 126 beyond, within 3 units in the last place; 0 from -127 on down. Cheaper than exp:
// x = n + r is exact, and n is added to the exponent of the polynomial's value, in [0.7, 1.42], as an integer.
inline VecF exp2(const VecF& x) {
  constexpr float to_bits = 12582912.0F;  // 1.5 2^23: adding it leaves n in the last bits
  const VecF inside = at::vec::clamp(x, VecF(-127.0F), VecF(126.0F));
  const VecF shifted = inside + VecF(to_bits);
  const VecF r = inside - (shifted - VecF(to_bits));
  const VecF square = r * r;
  const VecF low = at::vec::fmadd(VecF(0.693147004F), r, VecF(1.0F));
  const VecF middle = at::vec::fmadd(VecF(0.0555073358F), r, VecF(0.240222424F));
  const VecF high = at::vec::fmadd(VecF(0.00132647238F), r, VecF(0.00967151299F));
  const VecF polynomial = at::vec::fmadd(at::vec::fmadd(high, square, middle), square, low);
  using VecI = at::vec::Vectorized<int32_t>;
  const VecI exponents = at::vec::cast<int32_t>(shifted) << VecI(23);
  return at::vec::cast<float>(at::vec::cast<int32_t>(polynomial) + exponents);
}

inline VecD exp2(const VecD& x) { return (at::vec::clamp_max(x, VecD(1022)) * VecD(0.6931471805599453)).exp(); }

// s = 1 / (1 + e^-x) and 1 - s, which is not taken as a difference, so that it keeps its relative accuracy.
template <class V>
struct Sigmoid {
  V value;
  V complement;
};

template <class V>
inline Sigmoid<V> sigmoid(const V& x) {
  // Where e^-x would be infinite, s is as good as 0 long since.
  const V odds_against = exp(V(0) - at::vec::clamp_min(x, V(-87)));
  const V value = V(1) / (V(1) + odds_against);
  return {value, odds_against * value};
}

// s = 1 / (1 + 2^y), a few operations less than the sigmoid of -log(2) y.
template <class V>
inline Sigmoid<V> sigmoid_by_powers_of_2(const V& y) {
  const V odds_against = exp2(y);
  const V value = V(1) / (V(1) + odds_against);
  return {value, odds_against * value};
}

// The normal distribution's density and the probability of less than x.
template <class V>
struct Normal {
  V density;
  V probability;
};

// With q(|x|) the probability of more than |x|: q = e^(-x^2 / 2) t p(t), t = 1 / (1 + 0.34 |x|), as in Abramowitz and
// Stegun 7.1.26, p of degree 8 fitted to a relative error of 3e-8. Absolute error of the probability under 1e-7.
inline Normal<VecF> normal(const VecF& x) {
  const VecF density = VecF(0.398942280F) * exp(x * x * VecF(-0.5F));
  const VecF t = VecF(1.0F) / at::vec::fmadd(x.abs(), VecF(0.34F), VecF(1.0F));
  constexpr float coefficients[] = {-0.0654743194F, 0.349673353F, -0.684642201F, 0.506796710F, -0.112092449F,
                                    0.289162492F,   0.288757724F, 0.341182679F,  0.339950190F};
  VecF p(coefficients[0]);
  for (int i = 1; i < 9; ++i) p = at::vec::fmadd(p, t, VecF(coefficients[i]));
  const VecF above = density * t * p;
  return {density, VecF::blendv(above, VecF(1.0F) - above, x >= VecF(0.0F))};
}

inline Normal<VecD> normal(const VecD& x) {
  return {VecD(0.3989422804014327) * exp(x * x * VecD(-0.5)), VecD(0.5) * (x * VecD(-0.7071067811865476)).erfc()};
}

}  // namespace
}  // namespace timelyfreeze::kernels
