// The CPU kernels against plain double precision: every instruction set that this processor has, shapes around the
// width of a vector, all dtypes, what may be left out; and the same bits whatever the number of threads.
#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "kernels/cpu/rows.h"
#include "tests/check.h"

namespace timelyfreeze::kernels {
namespace {

constexpr int64_t row_counts[] = {0, 1, 3, 17};
constexpr int64_t col_counts[] = {1, 2, 7, 8, 15, 64, 1000, 4097};
constexpr double infinity = std::numeric_limits<double>::infinity();

template <class T>
using Real = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <class T>
constexpr DType dtype_of = std::is_same_v<T, float>       ? DType::f32
                           : std::is_same_v<T, double>    ? DType::f64
                           : std::is_same_v<T, c10::Half> ? DType::f16
                                                          : DType::bf16;

// Half a unit in the last place of T, and what sums of thousands of terms may add to it.
template <class T>
constexpr double error_of = std::is_same_v<T, float>       ? 2e-6
                            : std::is_same_v<T, double>    ? 1e-14
                            : std::is_same_v<T, c10::Half> ? 0x1p-11 + 2e-6
                                                           : 0x1p-8 + 2e-6;

template <class T>
std::vector<T> random_values(int64_t count, double scale = 1.0) {
  static std::mt19937_64 generator(7);
  std::normal_distribution<double> normal;
  std::vector<T> values(count);
  for (T& value : values) value = static_cast<T>(static_cast<Real<T>>(scale * normal(generator)));
  return values;
}

template <class T>
void check_close(T got, double want, double scale) {
  const double error = std::abs(static_cast<double>(got) - want);
  const double smallest = std::is_same_v<T, c10::Half> ? 0x1p-25 : 0.0;  // half the step of its smallest
  const bool same = got == static_cast<T>(static_cast<Real<T>>(want));   // overflow too
  if (!same && !(error <= error_of<T> * (std::abs(want) + scale) + smallest)) {
    std::fprintf(stderr, "got %.9g, want %.9g, scale %.3g\n", static_cast<double>(got), want, scale);
    CHECK(false);
  }
}

template <class Body>
void for_each_dtype(const Body& body) {
  body(float{});
  body(double{});
  body(c10::BFloat16{});
  body(c10::Half{});
}

template <class Body>
void for_each_set(const Body& body) {
  body(Plain{});
#ifdef __x86_64__
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) body(Avx2{});
  if (__builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) body(Avx512{});
#endif
}

template <class Body>
void for_each_case(const Body& body) {
  for_each_set([&](auto set) {
    for_each_dtype([&](auto element) {
      for (int64_t rows : row_counts) {
        for (int64_t cols : col_counts) body(set, element, rows, cols);
      }
    });
  });
}

struct NormOptions {
  bool centered, residual, weight, bias, frozen, dh;
};

template <class Set, class T, class W>
void check_norm(int64_t rows, int64_t cols, const NormOptions& options) {
  using R = Real<T>;
  const int64_t count = rows * cols, num_partials = 2;
  const NormShape shape{rows, cols, options.centered, 1e-5, dtype_of<T>, dtype_of<W>};
  const auto x = random_values<T>(count), residual = random_values<T>(count), dy = random_values<T>(count),
             dh = random_values<T>(count);
  const auto weight = random_values<W>(cols), bias = random_values<W>(cols);
  std::vector<T> h(count), y(count), dx(count);
  std::vector<R> mean(rows), rstd(rows), dweight(num_partials * cols, 5), dbias(num_partials * cols, 5);
  NormForward forward{.x = x.data(), .h = h.data(), .y = y.data(), .mean = mean.data(), .rstd = rstd.data()};
  if (options.residual) forward.residual = residual.data();
  if (options.weight) forward.weight = weight.data();
  if (options.bias) forward.bias = bias.data();
  norm_forward_rows<Set>(shape, forward, 0, rows);
  if (!options.residual) h = x;
  NormBackward backward{.dy = dy.data(),
                        .h = h.data(),
                        .weight = forward.weight,
                        .mean = mean.data(),
                        .rstd = rstd.data(),
                        .dx = dx.data(),
                        .num_partials = num_partials};
  if (options.dh) backward.dh = dh.data();
  if (options.frozen) {
    norm_backward_rows<Set>(shape, backward, 0, rows);
  } else {
    backward.dweight = dweight.data();
    backward.dbias = dbias.data();
    norm_backward_partials<Set>(shape, backward, 0, num_partials);
  }

  std::vector<double> dweight_want(cols), dbias_want(cols);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t at = row * cols;
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < cols; ++i) {
      if (options.residual) CHECK(h[at + i] == static_cast<T>(R(x[at + i]) + R(residual[at + i])));
      sum += h[at + i];
    }
    const double mu = options.centered ? sum / cols : 0.0;
    for (int64_t i = 0; i < cols; ++i) squares += (h[at + i] - mu) * (h[at + i] - mu);
    const double r = 1 / std::sqrt(squares / cols + shape.eps);
    CHECK(std::abs(rstd[row] - r) <= error_of<R> * r);
    if (options.centered) CHECK(std::abs(mean[row] - mu) <= error_of<R> * 4);
    double along_z = 0, along_ones = 0, largest = 0;
    const auto z = [&](int64_t i) { return (h[at + i] - mu) * r; };
    const auto g = [&](int64_t i) { return double(dy[at + i]) * (options.weight ? double(weight[i]) : 1.0); };
    for (int64_t i = 0; i < cols; ++i) {
      along_z += g(i) * z(i) / cols;
      along_ones += options.centered ? g(i) / cols : 0.0;
      largest = std::max({largest, std::abs(g(i)), std::abs(g(i) * z(i))});
      dweight_want[i] += dy[at + i] * z(i);
      dbias_want[i] += dy[at + i];
      const double w = options.weight ? double(weight[i]) : 1.0, b = options.bias ? double(bias[i]) : 0.0;
      check_close(y[at + i], z(i) * w + b, r * (std::abs(w) + std::abs(b)));
    }
    for (int64_t i = 0; i < cols; ++i) {
      const double add = options.dh ? double(dh[at + i]) : 0.0;
      check_close(dx[at + i], r * (g(i) - z(i) * along_z - along_ones) + add, std::abs(add) + 4 * r * largest);
    }
  }
  for (int64_t i = 0; i < cols && !options.frozen; ++i) {
    check_close(dweight[i] + dweight[cols + i], dweight_want[i], 100);
    check_close(dbias[i] + dbias[cols + i], dbias_want[i], 20);
  }
}

TEST(norms_match_double_precision) {
  for_each_case([]<class Set, class T>(Set, T, int64_t rows, int64_t cols) {
    for (bool centered : {false, true}) {
      check_norm<Set, T, T>(rows, cols, {centered, true, true, centered, true, true});
      check_norm<Set, T, T>(rows, cols, {centered, false, true, true, false, false});
      check_norm<Set, T, float>(rows, cols, {centered, true, true, centered, false, true});
      check_norm<Set, T, T>(rows, cols, {centered, false, false, false, true, false});
    }
  });
}

struct Slope {
  double value, slope;
};

Slope activate(Activation activation, double x) {
  if (activation == Activation::gelu) {
    const double p = 0.5 * std::erfc(-x / std::sqrt(2.0));
    return {x * p, p + x * std::exp(-0.5 * x * x) / std::sqrt(2 * M_PI)};
  }
  const double k = std::sqrt(2 / M_PI);
  const bool silu = activation == Activation::silu;
  const double u = silu ? x : 2 * k * (x + 0.044715 * x * x * x), du = silu ? 1 : 2 * k * (1 + 3 * 0.044715 * x * x);
  const double s = 1 / (1 + std::exp(-u)), rest = 1 / (1 + std::exp(u));
  return {x * s, s + x * s * rest * du};
}

TEST(activations_match_double_precision) {
  for_each_case([]<class Set, class T>(Set, T, int64_t rows, int64_t cols) {
    const int64_t count = rows * cols;
    const auto dy = random_values<T>(count);
    for (bool gated : {false, true}) {
      auto x = random_values<T>(count * (1 + gated), 4.0);
      const double extremes[] = {0.0, -0.0, 90.0, -90.0, 2000.0, -2000.0, 1e-6, -1e-6};
      for (size_t i = 0; i < std::min<size_t>(x.size(), 8); ++i) x[i] = static_cast<T>(extremes[i]);
      for (auto activation : {Activation::silu, Activation::gelu, Activation::gelu_tanh}) {
        const ActivationShape shape{rows, cols, gated, activation, dtype_of<T>};
        std::vector<T> y(count), dx(x.size());
        const int64_t middle = count / 3;  // parts need not begin with a row
        activation_forward_elements<Set>(shape, x.data(), y.data(), 0, middle);
        activation_forward_elements<Set>(shape, x.data(), y.data(), middle, count);
        activation_backward_elements<Set>(shape, x.data(), dy.data(), dx.data(), 0, middle);
        activation_backward_elements<Set>(shape, x.data(), dy.data(), dx.data(), middle, count);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t at = gated ? i + i / cols * cols : i;
          const double gate = x[at], up = gated ? double(x[at + cols]) : 1.0, gradient = dy[i];
          const Slope want = activate(activation, gate);
          const double scale = 0.1 * std::abs(up);
          check_close(y[i], want.value * up, scale);
          check_close(dx[at], gradient * up * want.slope, scale * std::abs(gradient) * 8);
          if (gated) check_close(dx[at + cols], gradient * want.value, 0.1 * std::abs(gradient));
        }
      }
    }
  });
}

// silu(-x) = -x / (1 + e^x) has the relative error of the exponential.
TEST(exponential_keeps_its_relative_error) {
  constexpr int64_t count = 100000;
  std::vector<float> x(count), y(count);
  for (int64_t i = 0; i < count; ++i) x[i] = -85.0F * (i + 1) / count;
  for_each_set([&]<class Set>(Set) {
    activation_forward_elements<Set>({1, count, false, Activation::silu, DType::f32}, x.data(), y.data(), 0, count);
    for (int64_t i = 0; i < count; ++i) {
      const double want = activate(Activation::silu, x[i]).value;
      CHECK(std::abs(y[i] - want) <= 5 * 0x1p-24 * std::abs(want));
    }
  });
}

TEST(rope_turns_pairs_wherever_heads_lie) {
  for_each_set([]<class Set>(Set) {
    for_each_dtype([]<class T>(T) {
      for (int64_t width : {2, 6, 16, 64, 130}) {
        const int64_t batch = 2, heads = 3, length = 5, offset = 4, half = width / 2, packed = heads * width + 8;
        const int64_t count = batch * heads * length * width;
        const auto in = random_values<T>(batch * length * packed);
        const auto cosines = random_values<float>((offset + length) * half);
        const auto sines = random_values<float>((offset + length) * half);
        const Heads from{in.data(), length * packed, width, packed};
        std::vector<T> out(count), copy(count);
        const Heads to{out.data(), heads * length * width, length * width, width};
        const Heads copied{copy.data(), to.batch_step, to.head_step, to.position_step};
        for (bool inverse : {false, true}) {
          const RopeShape shape{batch, heads, length, width, offset, inverse, dtype_of<T>};
          const auto* c = cosines.data();
          const auto* s = sines.data();
          rope_positions<Set>(shape, from, to, c, s, 0, batch * length);
          rope_positions<Set>(shape, from, copied, nullptr, nullptr, 0, batch * length);
          for (int64_t i = 0; i < count; ++i) {
            const int64_t feature = i % width, position = i / width % length, head = i / width / length % heads;
            const T* of_head = in.data() + (i / (heads * length * width) * length + position) * packed + head * width;
            const int64_t angle = (offset + position) * half + feature % half;
            const double cosine = cosines[angle], sine = inverse ? -sines[angle] : sines[angle];
            const double first = of_head[feature % half], second = of_head[half + feature % half];
            check_close(out[i], feature < half ? first * cosine - second * sine : second * cosine + first * sine, 4);
            CHECK(copy[i] == of_head[feature]);
          }
          rope_positions<Set>(shape, copied, copied, c, s, 0, batch * length);  // in place
          CHECK(std::equal(out.begin(), out.end(), copy.begin()));
        }
      }
    });
  });
}

template <class Set, class T>
void check_cross_entropy(int64_t rows, int64_t cols, double smoothing, double z_loss, bool masked) {
  auto logits = random_values<T>(rows * cols, 3.0);
  std::vector<int64_t> target(rows);
  for (int64_t row = 0; row < rows; ++row) {
    target[row] = row % 4 == 2 ? -100 : (row * 13 + cols - 1) % cols;
    for (int64_t i = 0; masked && i < cols; ++i) {
      if (i != target[row] && i * 3 < cols * 2) logits[row * cols + i] = static_cast<T>(-infinity);
    }
  }
  const auto before = logits;
  std::vector<Real<T>> loss(rows), alone(rows);
  const CrossEntropyShape shape{rows, cols, -100, smoothing, z_loss, dtype_of<T>};
  cross_entropy_rows<Set>(shape, logits.data(), target.data(), alone.data(), false, 0, rows);
  CHECK(std::equal(logits.begin(), logits.end(), before.begin()));
  cross_entropy_rows<Set>(shape, logits.data(), target.data(), loss.data(), true, 0, rows);
  CHECK(loss == alone);
  for (int64_t row = 0; row < rows; ++row) {
    const T* x = before.data() + row * cols;
    double sum = 0, exponentials = 0;
    for (int64_t i = 0; i < cols; ++i) sum += x[i], exponentials += std::exp(double(x[i]));
    const double lse = std::log(exponentials);
    const bool ignored = target[row] == -100;
    double want = 0;
    if (!ignored) want = lse - (1 - smoothing) * x[target[row]] + z_loss * lse * lse;
    if (!ignored && smoothing > 0) want -= smoothing * sum / cols;
    check_close(loss[row], want, 20);
    for (int64_t i = 0; i < cols; ++i) {
      const double share = (i == target[row] ? 1 - smoothing : 0.0) + smoothing / cols;
      const double gradient = std::exp(x[i] - lse) * (1 + 2 * z_loss * lse) - share;
      if (ignored || double(x[i]) == -infinity)
        CHECK(double(logits[row * cols + i]) == (ignored ? 0.0 : double(T(-share))));
      if (!ignored) check_close(logits[row * cols + i], gradient, i == target[row] ? 1 : 0.05);
    }
  }
}

TEST(cross_entropy_matches_double_precision) {
  for_each_case([]<class Set, class T>(Set, T, int64_t rows, int64_t cols) {
    check_cross_entropy<Set, T>(rows, cols, 0.0, 0.0, false);
    check_cross_entropy<Set, T>(rows, cols, 0.0, 0.0, true);
    check_cross_entropy<Set, T>(rows, cols, 0.1, 1e-3, false);
  });
}

TEST(cross_entropy_keeps_not_a_number) {
  for_each_set([]<class Set>(Set) {
    for (int64_t at : {0, 5, 2047, 2048, 4999}) {
      std::vector<float> logits(5000, static_cast<float>(-infinity));
      const int64_t target = 4990;
      logits[target] = 1.0F;
      logits[at] = std::numeric_limits<float>::quiet_NaN();
      float loss = 0;
      cross_entropy_rows<Set>({1, 5000}, logits.data(), &target, &loss, true, 0, 1);
      CHECK(std::isnan(loss));
    }
  });
}

// What the kernels that share their work out write, with the threads that torch is told to use.
std::vector<float> results_with_threads(int num_threads) {
  at::set_num_threads(num_threads);
  constexpr int64_t rows = 130, cols = 1003, count = rows * cols;
  static const auto x = random_values<float>(2 * count), dy = random_values<float>(count);
  static const auto weight = random_values<float>(cols);
  std::vector<float> all, y(count), dx(2 * count), mean(rows), rstd(rows), loss(rows), logits = dy;
  const auto keep = [&all](const std::vector<float>& values) { all.insert(all.end(), values.begin(), values.end()); };
  const NormShape norm{rows, cols, true, 1e-5};
  const int64_t num_partials = norm_num_partials_cpu(norm);
  CHECK(num_partials == 2);
  std::vector<float> dweight(num_partials * cols), dbias(num_partials * cols);
  norm_forward_cpu(norm,
                   {.x = x.data(), .weight = weight.data(), .y = y.data(), .mean = mean.data(), .rstd = rstd.data()});
  keep(y);
  NormBackward backward{.dy = dy.data(),
                        .h = x.data(),
                        .weight = weight.data(),
                        .mean = mean.data(),
                        .rstd = rstd.data(),
                        .dx = dx.data()};
  norm_backward_cpu(norm, backward);
  keep(dx);
  backward.dweight = dweight.data(), backward.dbias = dbias.data(), backward.num_partials = num_partials;
  norm_backward_cpu(norm, backward);
  keep(dx), keep(dweight), keep(dbias);
  const ActivationShape gelu{rows, cols, true, Activation::gelu};
  activation_forward_cpu(gelu, x.data(), y.data());
  activation_backward_cpu(gelu, x.data(), dy.data(), dx.data());
  keep(y), keep(dx);
  const Heads in{x.data(), 0, 1000, cols}, out{y.data(), 0, 1000, cols};
  rope_cpu({.batch = 1, .heads = 1, .length = rows, .width = 1000}, in, out, dy.data(), x.data());
  keep(y);
  const std::vector<int64_t> target(rows, 3);
  cross_entropy_cpu({rows, cols}, logits.data(), target.data(), loss.data(), true);
  keep(logits), keep(loss);
  return all;
}

TEST(bits_do_not_depend_on_the_number_of_threads) { CHECK(results_with_threads(1) == results_with_threads(2)); }

}  // namespace
}  // namespace timelyfreeze::kernels
