#pragma once
#include "kernels/types.h"

// Activations, plain and gated: y = a(x), or of rows that hold gate and up behind each other, y = a(gate) up.
//
//   silu(x) = x / (1 + exp(-x))                                    (arXiv 1702.03118)
//   gelu(x) = x (1 + erf(x / sqrt 2)) / 2                          (arXiv 1606.08415)
//   gelu_tanh(x) = x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
//   dx = dy a'(x);  dgate = dy up a'(gate),  dup = dy a(gate)      SwiGLU, GeGLU: arXiv 2002.05202
//
// Backward recomputes a from the input, so nothing else is kept. Bytes in units of the output: plain, forward 1 + 1 and
// backward 2 + 1; gated, forward 2 + 1 and backward 3 + 2.
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
