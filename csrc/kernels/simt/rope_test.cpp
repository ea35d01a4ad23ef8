#include "kernels/rope.h"

#include "kernels/cuda/rope.cu"
#include "kernels/simt/testing.h"

// Rotations against their formula in float64, in the layouts that attention has.
namespace timelyfreeze::kernels::testing {
namespace {

// How an array [batch, heads, length, width] lies in `total` elements, of which it begins at `begin`.
struct Layout {
  int64_t batch_step, head_step, position_step, begin, total;

  [[nodiscard]] int64_t at(int64_t b, int64_t h, int64_t t, int64_t i) const {
    return begin + b * batch_step + h * head_step + t * position_step + i;
  }
  [[nodiscard]] Heads heads(Array& array, DType dtype) const {
    return {array.as<char>() + begin * bytes_of(dtype), batch_step, head_step, position_step};
  }
};

Layout contiguous(const RopeShape& s) {
  return {s.heads * s.length * s.width, s.length * s.width, s.width, 0, s.batch * s.heads * s.length * s.width};
}

// As the middle third of packed rows [batch, length, 3 heads width].
Layout packed(const RopeShape& s) {
  const int64_t row = 3 * s.heads * s.width;
  return {s.length * row, s.width, row, s.heads * s.width, s.batch * s.length * row};
}

// Rows with one element of padding: nothing is a multiple of 16 bytes.
Layout padded(const RopeShape& s) {
  const int64_t row = s.width + 1;
  return {s.heads * s.length * row, s.length * row, row, 1, s.batch * s.heads * s.length * row + 1};
}

template <typename Use>
void for_each_element(const RopeShape& s, const Use& use) {
  for (int64_t b = 0; b < s.batch; ++b) {
    for (int64_t h = 0; h < s.heads; ++h) {
      for (int64_t t = 0; t < s.length; ++t) {
        for (int64_t i = 0; i < s.width; ++i) use(b, h, t, i);
      }
    }
  }
}

void run(const RopeShape& s, const Layout& in_layout, const Layout& out_layout, bool tables, int64_t misaligned) {
  const int64_t half = s.width / 2;
  Array in(s.dtype, in_layout.total, misaligned), out(s.dtype, out_layout.total);
  Array cosines(DType::f32, (s.offset + s.length) * half), sines(DType::f32, cosines.count());
  in.randomize(1);
  for (int64_t i = 0; i < cosines.count(); ++i) {
    cosines.set(i, std::cos(0.37 * i));
    sines.set(i, std::sin(0.37 * i));
  }
  const float* cosine_table = tables ? cosines.as<float>() : nullptr;
  const float* sine_table = tables ? sines.as<float>() : nullptr;
  const auto turn = [&] {
    rope_cuda(s, in_layout.heads(in, s.dtype), out_layout.heads(out, s.dtype), cosine_table, sine_table, nullptr);
  };
  in_both_orders(turn, {&out});
  const auto written = out.bytes();

  int64_t num_set = 0;
  for (int64_t i = 0; i < out.count(); ++i) num_set += std::isnan(out[i]) ? 0 : 1;
  CHECK(num_set == s.batch * s.heads * s.length * s.width);  // and nothing between
  for_each_element(s, [&](int64_t b, int64_t h, int64_t t, int64_t i) {
    const double self = in[in_layout.at(b, h, t, i)];
    const double other = in[in_layout.at(b, h, t, (i + half) % s.width)] * (i < half ? -1.0 : 1.0);
    const int64_t angle = (s.offset + t) * half + i % half;
    const double sine = s.inverse ? -sines[angle] : sines[angle];
    if (tables) {
      out.check(out_layout.at(b, h, t, i), self * cosines[angle] + other * sine, 2.0);
    } else {
      CHECK(out[out_layout.at(b, h, t, i)] == self);
    }
  });

  // In place: the same bits.
  const Heads here = in_layout.heads(in, s.dtype);
  rope_cuda(s, here, here, cosine_table, sine_table, nullptr);
  for_each_element(s, [&](int64_t b, int64_t h, int64_t t, int64_t i) {
    CHECK(in[in_layout.at(b, h, t, i)] == out[out_layout.at(b, h, t, i)]);
  });
}

}  // namespace

void test_rope() {
  for (const DType dtype : kDTypes) {
    for (const int64_t width : {2, 6, 16, 30, 64, 128, 8192}) {
      for (const int64_t heads : {0, 1, 2, 5}) {
        for (const int64_t length : {0, 1, 9}) {
          if (width > 128 && length > 1) continue;
          const bool inverse = (heads + length) % 2 == 1;
          const RopeShape s{2, heads, length, width, 3, inverse, dtype};
          run(s, contiguous(s), contiguous(s), true, 0);
          run(s, packed(s), contiguous(s), true, 0);
          run(s, contiguous(s), packed(s), true, 1);
          run(s, padded(s), packed(s), true, 0);
          run(s, packed(s), padded(s), false, 0);
          run(s, contiguous(s), packed(s), false, 0);
        }
      }
    }
  }
}

}  // namespace timelyfreeze::kernels::testing
