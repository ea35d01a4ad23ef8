#include "kernels/activation.h"

#include "kernels/cuda/activation.cu"
#include "kernels/simt/testing.h"

// Activations against their formulas in float64.
namespace timelyfreeze::kernels::testing {
namespace {

constexpr double kPi = 3.14159265358979323846;

// a(x) and a'(x).
std::pair<double, double> reference(Activation activation, double x) {
  if (activation == Activation::silu) {
    const double s = 1.0 / (1.0 + std::exp(-x));
    return {x * s, s * (1.0 + x * (1.0 - s))};
  }
  if (activation == Activation::gelu) {
    const double normal = 0.5 * std::erfc(-x / std::sqrt(2.0));
    return {x * normal, normal + x * std::exp(-x * x / 2) / std::sqrt(2 * kPi)};
  }
  const double t = std::tanh(std::sqrt(2 / kPi) * (x + 0.044715 * x * x * x));
  const double inner = std::sqrt(2 / kPi) * (1 + 3 * 0.044715 * x * x);
  return {x * (1 + t) / 2, (1 + t) / 2 + x * (1 - t * t) / 2 * inner};
}

void run(const ActivationShape& s, int64_t misaligned) {
  const int64_t count = s.rows * s.cols;
  const int64_t in_cols = s.gated ? 2 * s.cols : s.cols;
  Array x(s.dtype, s.rows * in_cols, misaligned), dy(s.dtype, count);
  Array y(s.dtype, count), dx(s.dtype, s.rows * in_cols, misaligned);
  x.randomize(1, 3.0);
  dy.randomize(2);
  // Where exp overflows, and cubes in float16.
  const double extremes[] = {0.0, -100.0, 100.0, -3e3, 3e3};
  for (int64_t i = 0; i < std::min<int64_t>(5, s.rows > 0 ? s.cols : 0); ++i) x.set(i, extremes[i]);
  in_both_orders([&] { activation_forward_cuda(s, x.data(), y.data(), nullptr); }, {&y});
  in_both_orders([&] { activation_backward_cuda(s, x.data(), dy.data(), dx.data(), nullptr); }, {&dx});
  for (int64_t row = 0; row < s.rows; ++row) {
    for (int64_t j = 0; j < s.cols; ++j) {
      const int64_t at = row * s.cols + j;
      const int64_t gate = row * in_cols + j;
      const double up = s.gated ? x[gate + s.cols] : 1.0;
      const auto [value, slope] = reference(s.activation, x[gate]);
      y.check(at, value * up, 1.0 + std::fabs(up));
      dx.check(gate, dy[at] * up * slope, 1.0 + std::fabs(dy[at] * up));
      if (s.gated) dx.check(gate + s.cols, dy[at] * value, 1.0 + std::fabs(dy[at]));
    }
  }
}

}  // namespace

void test_activation() {
  for (const DType dtype : kDTypes) {
    for (const Activation activation : {Activation::silu, Activation::gelu, Activation::gelu_tanh}) {
      for (const bool gated : {false, true}) {
        for (const int64_t rows : kRows) {
          for (const int64_t cols : kCols) {
            if (rows == 17 && cols > 1000) continue;
            for (const int64_t misaligned : {0, 1}) run({rows, cols, gated, activation, dtype}, misaligned);
          }
        }
      }
    }
  }
}

}  // namespace timelyfreeze::kernels::testing
