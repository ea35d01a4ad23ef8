#pragma once
#include "kernels/types.h"

// RMSNorm (Zhang and Sennrich, arXiv 1910.07467, section 3, equation 4) and LayerNorm (Ba et al., arXiv 1607.06450,
// section 3, equation 4) of rows, with the addition of a residual stream before and of its gradient behind.
//
//   h = x + residual
//   mean = centered ? sum(h) / cols : 0
//   rstd = 1 / sqrt(sum((h - mean)^2) / cols + eps)
//   z = (h - mean) rstd
//   y = z weight + bias
//
//   g = dy weight
//   dx = rstd (g - z sum(g z) / cols - (centered ? sum(g) / cols : 0)) + dh
//   dweight = sum over rows of dy z,   dbias = sum over rows of dy
//
// Bytes, in units of one array of rows x cols: forward reads 1 and writes 1 (with a residual: 2 and 2); backward reads
// 2 and writes 1 (with dh: 3 and 1), whether or not weights train. Beside these, small: rstd (and mean) of 4 bytes a
// row, weight and bias of cols, and trained, num_partials x cols sums of 4 bytes, written and read once each.
namespace timelyfreeze::kernels {

struct NormShape {
  int64_t rows = 0;
  int64_t cols = 0;
  bool centered = false;  // LayerNorm; else RMSNorm
  double eps = 0.0;
  DType dtype = DType::f32;         // of x, residual, h, y and their gradients
  DType weight_dtype = DType::f32;  // of weight and bias
};

// Arrays are contiguous; statistics are float32, or float64 where dtype is f64.
struct NormForward {
  const void* x = nullptr;
  const void* residual = nullptr;  // null: h is x, and is not written
  const void* weight = nullptr;    // null: ones
  const void* bias = nullptr;      // null: zeros
  void* h = nullptr;
  void* y = nullptr;
  void* mean = nullptr;  // [rows]; null where not centered, or not wanted
  void* rstd = nullptr;  // [rows]; null where not wanted
};

struct NormBackward {
  const void* dy = nullptr;
  const void* dh = nullptr;  // null: zeros
  const void* h = nullptr;
  const void* weight = nullptr;  // null: ones
  const void* mean = nullptr;
  const void* rstd = nullptr;
  void* dx = nullptr;       // null: not wanted
  void* dweight = nullptr;  // [num_partials, cols], float32 (f64 where dtype is f64); null: frozen
  void* dbias = nullptr;    // the same
  int64_t num_partials = 0;
};

// How many partial sums backward writes: a function of the shape alone, so that their sum has one order.
int64_t norm_num_partials_cpu(const NormShape& shape);
int64_t norm_num_partials_cuda(const NormShape& shape);

void norm_forward_cpu(const NormShape& shape, const NormForward& arrays);
void norm_backward_cpu(const NormShape& shape, const NormBackward& arrays);
void norm_forward_cuda(const NormShape& shape, const NormForward& arrays, Stream stream);
void norm_backward_cuda(const NormShape& shape, const NormBackward& arrays, Stream stream);

}  // namespace timelyfreeze::kernels
