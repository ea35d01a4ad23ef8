#pragma once
#include "kernels/types.h"

// Activations, plain and gated: y = a(x), or of rows that hold gate and up behind each other, y = a(gate) up.
//
//   silu(x) = x s(x),  s(x) = 1 / (1 + exp(-x))                  (Elfwing et al., arXiv 1702.03118, section 2)
//   gelu(x) = x P(x),  P(x) = (1 + erf(x / sqrt 2)) / 2          (Hendrycks and Gimpel, arXiv 1606.08415, section 2)
//   gelu_tanh(x) = x T(x),  T(x) = (1 + tanh u) / 2,  u = sqrt(2 / pi) (x + 0.044715 x^3)      (the same section)
//
//   silu'(x) = s (1 + x (1 - s))
//   gelu'(x) = P + x exp(-x^2 / 2) / sqrt(2 pi)
//   gelu_tanh'(x) = T + x (1 - tanh^2 u) / 2 sqrt(2 / pi) (1 + 3 0.044715 x^2)
//
//   plain: dx = dy a'(x);   gated (SwiGLU, GeGLU: Shazeer, arXiv 2002.05202, section 2): dgate = dy up a'(gate),
//   dup = dy a(gate)
//
// Backward recomputes a from the input, so nothing else is kept. Bytes, in units of the output (rows x cols): plain,
// forward reads 1 and writes 1, backward reads 2 (x, dy) and writes 1; gated, forward reads 2 and writes 1, backward
// reads 3 (gate, up, dy) and writes 2.
namespace timelyfreeze::kernels {

enum class Activation : uint8_t { silu, gelu, gelu_tanh };

struct ActivationShape {
  int64_t rows = 0;
  int64_t cols = 0;  // of the output; a gated input has twice as many
  bool gated = false;
  Activation activation = Activation::silu;
  DType dtype = DType::f32;
};

// Arrays are contiguous.
void activation_forward_cpu(const ActivationShape& shape, const void* x, void* y);
void activation_backward_cpu(const ActivationShape& shape, const void* x, const void* dy, void* dx);
void activation_forward_cuda(const ActivationShape& shape, const void* x, void* y, Stream stream);
void activation_backward_cuda(const ActivationShape& shape, const void* x, const void* dy, void* dx, Stream stream);

}  // namespace timelyfreeze::kernels
