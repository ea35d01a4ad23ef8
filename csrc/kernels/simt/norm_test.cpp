#include "kernels/norm.h"

#include "kernels/cuda/norm.cu"
#include "kernels/simt/testing.h"

// Norms against their formulas in float64.
namespace timelyfreeze::kernels::testing {
namespace {

struct Case {
  NormShape shape;
  bool residual = false;  // in backward: dh
  bool weight = true;
  bool bias = true;
  bool trainable = false;
  bool wants_input = true;
  int64_t misaligned = 0;
};

void forward(const Case& c) {
  const NormShape& s = c.shape;
  const int64_t count = s.rows * s.cols;
  Array x(s.dtype, count, c.misaligned), residual(s.dtype, count), weight(s.weight_dtype, s.cols),
      bias(s.weight_dtype, s.cols);
  Array h(s.dtype, count), y(s.dtype, count), mean(DType::f32, s.rows), rstd(DType::f32, s.rows);
  x.randomize(1, 2.0);
  residual.randomize(2);
  weight.randomize(3);
  bias.randomize(4);
  NormForward arrays{.x = x.data(), .y = y.data(), .mean = s.centered ? mean.data() : nullptr, .rstd = rstd.data()};
  if (c.residual) arrays.residual = residual.data();
  if (c.residual) arrays.h = h.data();
  if (c.weight) arrays.weight = weight.data();
  if (c.bias) arrays.bias = bias.data();
  in_both_orders([&] { norm_forward_cuda(s, arrays, nullptr); }, {&h, &y, &mean, &rstd});

  for (int64_t row = 0; row < s.rows; ++row) {
    const auto of = [&](int64_t j) { return c.residual ? h[row * s.cols + j] : x[row * s.cols + j]; };
    double sum = 0, squares = 0;
    for (int64_t j = 0; j < s.cols; ++j) {
      if (c.residual) h.check(row * s.cols + j, x[row * s.cols + j] + residual[row * s.cols + j]);
      sum += of(j);
    }
    const double m = s.centered ? sum / s.cols : 0.0;
    for (int64_t j = 0; j < s.cols; ++j) squares += (of(j) - m) * (of(j) - m);
    const double r = 1.0 / std::sqrt(squares / s.cols + s.eps);
    rstd.check(row, r, r);
    if (s.centered) mean.check(row, m);
    for (int64_t j = 0; j < s.cols; ++j) {
      const double product = (of(j) - m) * r * (c.weight ? weight[j] : 1.0);
      y.check(row * s.cols + j, product + (c.bias ? bias[j] : 0.0), 1.0 + std::fabs(product));
    }
  }
}

void check_weights(const Case& c, const Array& partials, int64_t num_partials, const std::vector<double>& expected,
                   const std::vector<double>& magnitude) {
  for (int64_t j = 0; j < c.shape.cols; ++j) {
    Array total(DType::f32, 1);
    double sum = 0;
    for (int64_t p = 0; p < num_partials; ++p) sum += partials[p * c.shape.cols + j];
    total.set(0, sum);
    total.check(0, expected[j], magnitude[j]);
  }
}

void backward(const Case& c) {
  const NormShape& s = c.shape;
  const int64_t count = s.rows * s.cols;
  const int64_t num_partials = c.trainable ? norm_num_partials_cuda(s) : 0;
  Array dy(s.dtype, count, c.misaligned), dh(s.dtype, count), h(s.dtype, count), weight(s.weight_dtype, s.cols);
  Array mean(DType::f32, s.rows), rstd(DType::f32, s.rows), dx(s.dtype, count);
  Array dweight(DType::f32, num_partials * s.cols), dbias(DType::f32, num_partials * s.cols);
  dy.randomize(1);
  dh.randomize(2);
  h.randomize(3);
  weight.randomize(4);
  mean.randomize(5, 0.1);
  for (int64_t row = 0; row < s.rows; ++row) rstd.set(row, 0.5 + 0.1 * (row % 7));
  NormBackward arrays{.dy = dy.data(), .h = h.data(), .rstd = rstd.data(), .num_partials = num_partials};
  if (s.centered) arrays.mean = mean.data();
  if (c.wants_input) arrays.dx = dx.data();
  if (c.residual) arrays.dh = dh.data();
  if (c.weight) arrays.weight = weight.data();
  if (c.trainable && c.weight) arrays.dweight = dweight.data();
  if (c.trainable && c.bias) arrays.dbias = dbias.data();
  in_both_orders([&] { norm_backward_cuda(s, arrays, nullptr); }, {&dx, &dweight, &dbias});

  std::vector<double> of_weight(s.cols), of_bias(s.cols), weight_magnitude(s.cols), bias_magnitude(s.cols);
  for (int64_t row = 0; row < s.rows; ++row) {
    const int64_t begin = row * s.cols;
    const auto z = [&](int64_t j) { return (h[begin + j] - (s.centered ? mean[row] : 0.0)) * rstd[row]; };
    const auto g = [&](int64_t j) { return dy[begin + j] * (c.weight ? weight[j] : 1.0); };
    double along_z = 0, along_one = 0;
    for (int64_t j = 0; j < s.cols; ++j) {
      along_z += g(j) * z(j) / s.cols;
      along_one += s.centered ? g(j) / s.cols : 0.0;
      of_weight[j] += dy[begin + j] * z(j);
      of_bias[j] += dy[begin + j];
      weight_magnitude[j] += std::fabs(dy[begin + j] * z(j));
      bias_magnitude[j] += std::fabs(dy[begin + j]);
    }
    for (int64_t j = 0; c.wants_input && j < s.cols; ++j) {
      const double added = c.residual ? dh[begin + j] : 0.0;
      dx.check(begin + j, rstd[row] * (g(j) - z(j) * along_z - along_one) + added, 2.0 + std::fabs(added));
    }
  }
  if (arrays.dweight != nullptr) check_weights(c, dweight, num_partials, of_weight, weight_magnitude);
  if (arrays.dbias != nullptr) check_weights(c, dbias, num_partials, of_bias, bias_magnitude);
}

Case make_case(int64_t rows, int64_t cols, DType dtype, unsigned options) {
  const auto bit = [&](unsigned i) { return (options >> i & 1) != 0; };
  const NormShape shape{.rows = rows,
                        .cols = cols,
                        .centered = bit(0),
                        .eps = 1e-5,
                        .dtype = dtype,
                        .weight_dtype = bit(1) ? dtype : DType::f32};
  return {.shape = shape,
          .residual = bit(2),
          .weight = !bit(3),
          .bias = !bit(4),
          .trainable = bit(5),
          .wants_input = !(bit(5) && bit(6)),
          .misaligned = bit(7) ? 1 : 0};
}

}  // namespace

void test_norm() {
  for (const DType dtype : kDTypes) {
    // Every option with a warp to a row, and with rows that need barriers; then every shape, with options in turn.
    for (const int64_t cols : {24, 264}) {
      for (unsigned options = 0; options < 256; options += dtype == DType::f32 ? 1 : 7) {
        const Case c = make_case(5, cols, dtype, options);
        forward(c);
        backward(c);
      }
    }
    unsigned options = 0;
    for (const int64_t rows : kRows) {
      for (const int64_t cols : kCols) {
        if (rows == 17 && cols > 1000) continue;
        for (const unsigned aligned : {0u, 128u}) {
          for (const unsigned trainable : {0u, 32u}) {
            const Case c = make_case(rows, cols, dtype, (options++ % 32) | aligned | trainable);
            forward(c);
            backward(c);
          }
        }
      }
    }
    // More rows than partial sums, narrow and wide.
    backward(make_case(4 * 264 + 5, 8, dtype, 32));
    backward(make_case(264 + 3, 600, dtype, 33));
  }
}

}  // namespace timelyfreeze::kernels::testing
