#pragma once
#include "kernels/types.h"

// Rotary position embedding (Su et al., arXiv 2104.09864, sections 3.2.2 and 3.4.2): features of a head in
// pairs, here (i, i + half) with half = width / 2 as LLaMA's checkpoints have them, are turned by the angle of their
// position. The map is orthogonal, so its backward turns back: the inverse, with sin negated.
//
//   out[i] = in[i] cos - in[i + half] sin
//   out[i + half] = in[i + half] cos + in[i] sin,        i < half, cos and sin of [offset + position, i]
//
// Bytes, in units of one array (batch x heads x length x width): reads 1 and writes 1, forward and backward alike; the
// tables, length x width floats in all, are read again from a cache for every head.
namespace timelyfreeze::kernels {

// An array [batch, heads, length, width] wherever it lies: steps in elements; features are contiguous.
struct Heads {
  const void* data = nullptr;
  int64_t batch_step = 0;
  int64_t head_step = 0;
  int64_t position_step = 0;
};

struct RopeShape {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t length = 0;
  int64_t width = 0;   // even
  int64_t offset = 0;  // of the first position in the tables
  bool inverse = false;
  DType dtype = DType::f32;
};

// `cosines` and `sines` are float32 [positions, width / 2]; null: features are copied as they are (the values of an
// attention, on their way into a packed gradient). `out` may be `in`.
void rope_cpu(const RopeShape& shape, const Heads& in, const Heads& out, const float* cosines, const float* sines);
void rope_cuda(const RopeShape& shape, const Heads& in, const Heads& out, const float* cosines, const float* sines,
               Stream stream);

}  // namespace timelyfreeze::kernels
