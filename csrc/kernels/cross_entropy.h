#pragma once
#include "kernels/types.h"

// Cross entropy of rows of logits and its gradient, in place of the logits: label smoothing s as in Szegedy et al.
// (arXiv 1512.00567, section 7), the z-loss as in PaLM (arXiv 2204.02311, section 5), with lse = log sum exp(logits)
// from one pass that keeps a running maximum (Milakov and Gimelshein, arXiv 1805.02867, algorithm 3):
//
//   loss = lse - (1 - s) logits[target] - s sum(logits) / cols + z_loss lse^2
//   dlogits = softmax (1 + 2 z_loss lse) - (1 - s) [j = target] - s / cols
//
// Rows whose target is ignore_index have loss 0 and gradients 0. Bytes, in units of the logits (rows x cols): 1 read
// for the loss alone, and for the gradient 1 more read and 1 written; target (8) and loss (4) a row beside these.
namespace timelyfreeze::kernels {

struct CrossEntropyShape {
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t ignore_index = -100;
  double label_smoothing = 0.0;
  double z_loss = 0.0;
  DType dtype = DType::f32;
};

// `target` is int64 [rows], `loss` float32 [rows] (float64 where dtype is f64). `logits` become their gradients where
// `wants_gradient`. Targets are in [0, cols) or ignore_index: the caller has checked.
void cross_entropy_cpu(const CrossEntropyShape& shape, void* logits, const int64_t* target, void* loss,
                       bool wants_gradient);
void cross_entropy_cuda(const CrossEntropyShape& shape, void* logits, const int64_t* target, float* loss,
                        bool wants_gradient, Stream stream);

}  // namespace timelyfreeze::kernels
