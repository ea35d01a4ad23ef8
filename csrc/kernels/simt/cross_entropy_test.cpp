#include "kernels/cross_entropy.h"

#include <limits>

#include "kernels/cuda/cross_entropy.cu"
#include "kernels/simt/testing.h"

// Cross entropy against its formulas in float64.
namespace timelyfreeze::kernels::testing {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Case {
  CrossEntropyShape shape;
  bool wants_gradient = true;
  int64_t misaligned = 0;
  double scale = 3.0;       // of the logits
  bool impossible = false;  // logits of -inf, as where a vocabulary is masked
};

void check_row(const Case& c, const Array& logits, const Array& out, const Array& loss, int64_t row, int64_t target) {
  const CrossEntropyShape& s = c.shape;
  const int64_t begin = row * s.cols;
  if (target == s.ignore_index) {
    CHECK(loss[row] == 0.0);
    for (int64_t j = 0; c.wants_gradient && j < s.cols; ++j) CHECK(out[begin + j] == 0.0);
    return;
  }
  double largest = -kInfinity, exponentials = 0.0, sum = 0.0;
  for (int64_t j = 0; j < s.cols; ++j) largest = std::fmax(largest, logits[begin + j]);
  for (int64_t j = 0; j < s.cols; ++j) {
    exponentials += std::exp(logits[begin + j] - largest);
    sum += logits[begin + j];
  }
  const double lse = largest + std::log(exponentials);
  double expected = lse - (1.0 - s.label_smoothing) * logits[begin + target] + s.z_loss * lse * lse;
  if (s.label_smoothing > 0.0) expected -= s.label_smoothing * sum / s.cols;
  loss.check(row, expected, 1.0 + std::fabs(lse) + std::fabs(logits[begin + target]) + s.z_loss * lse * lse);
  for (int64_t j = 0; c.wants_gradient && j < s.cols; ++j) {
    const double softmax = std::exp(logits[begin + j] - lse);
    const double hit = j == target ? 1.0 - s.label_smoothing : 0.0;
    // float32 holds the difference of logit and lse to 6e-8 of either.
    const double magnitude = (1.0 + std::fabs(lse) / 20.0) * (1.0 + std::fabs(2.0 * s.z_loss * lse));
    out.check(begin + j, softmax * (1.0 + 2.0 * s.z_loss * lse) - hit - s.label_smoothing / s.cols, magnitude);
  }
}

void run(const Case& c) {
  const CrossEntropyShape& s = c.shape;
  Array logits(s.dtype, s.rows * s.cols), out(s.dtype, s.rows * s.cols, c.misaligned), loss(DType::f32, s.rows);
  logits.randomize(1, c.scale);
  std::vector<int64_t> targets(s.rows);
  for (int64_t row = 0; row < s.rows; ++row) {
    // First, last, somewhere, and ignored.
    const int64_t choices[] = {0, s.cols - 1, s.cols / 2, s.ignore_index};
    targets[row] = choices[row % 4];
    for (int64_t j = 0; c.impossible && j < s.cols; ++j) {
      if (j % 3 != 0 && j != targets[row]) logits.set(row * s.cols + j, -kInfinity);
    }
  }
  in_both_orders(
      [&] {
        for (int64_t i = 0; i < logits.count(); ++i) out.set(i, logits[i]);
        cross_entropy_cuda(s, out.data(), targets.data(), loss.as<float>(), c.wants_gradient, nullptr);
      },
      {&out, &loss});
  for (int64_t row = 0; row < s.rows; ++row) check_row(c, logits, out, loss, row, targets[row]);
  if (!c.wants_gradient) CHECK(out.bytes() == logits.bytes());
}

}  // namespace

void test_cross_entropy() {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : kRows) {
      for (const int64_t cols : kCols) {
        if (rows == 17 && cols > 1000) continue;
        for (const int64_t misaligned : {0, 1, 3}) {
          const CrossEntropyShape plain{rows, cols, -100, 0.0, 0.0, dtype};
          const CrossEntropyShape smoothed{rows, cols, -1, 0.1, 1e-3, dtype};
          run({plain, true, misaligned});
          run({smoothed, true, misaligned});
          if (rows > 3) continue;
          run({plain, false, misaligned});
          run({plain, true, misaligned, 3e3});
          run({plain, true, misaligned, 3.0, true});
        }
      }
    }
  }
}

}  // namespace timelyfreeze::kernels::testing
