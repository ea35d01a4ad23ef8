#include "kernels/rope.h"

#include <cstring>

#include "kernels/cpu/vec.h"

namespace timelyfreeze::kernels {
namespace {

// Turns one head's features by the angles of its position.
template <class T>
void turn(const T* in, T* out, const float* cosines, const float* sines, Real<T> direction, int64_t half) {
  using V = Vec<T>;
  using R = Real<T>;
  for_each_vector<T>(half, [&](int64_t i, auto n) {
    V cosine, sine;
    if constexpr (std::is_same_v<R, float>) {
      cosine = load(cosines + i, n);
      sine = load(sines + i, n);
    } else {
      R lanes[2][width<T>] = {};
      for (int64_t k = 0; k < n; ++k) lanes[0][k] = cosines[i + k], lanes[1][k] = sines[i + k];
      cosine = V::loadu(lanes[0]);
      sine = V::loadu(lanes[1]);
    }
    sine = sine * V(direction);
    const V first = load(in + i, n), second = load(in + half + i, n);
    store(out + i, first * cosine - second * sine, n);
    store(out + half + i, at::vec::fmadd(first, sine, second * cosine), n);
  });
}

template <class T>
void turn_positions(const RopeShape& shape, const Heads& in, const Heads& out, const float* cosines, const float* sines,
                    int64_t begin, int64_t end) {
  const int64_t half = shape.width / 2;
  const auto start = [](const Heads& heads, int64_t batch, int64_t position) {
    return static_cast<const T*>(heads.data) + batch * heads.batch_step + position * heads.position_step;
  };
  for (int64_t item = begin; item < end; ++item) {
    const int64_t batch = item / shape.length, position = item % shape.length;
    const T* from = start(in, batch, position);
    T* to = const_cast<T*>(start(out, batch, position));
    const int64_t angles = (shape.offset + position) * half;
    for (int64_t head = 0; head < shape.heads; ++head, from += in.head_step, to += out.head_step) {
      if (cosines == nullptr) {
        std::memmove(to, from, shape.width * sizeof(T));
      } else {
        turn(from, to, cosines + angles, sines + angles, Real<T>(shape.inverse ? -1 : 1), half);
      }
    }
  }
}

}  // namespace

template <class Set>
void rope_positions(const RopeShape& shape, const Heads& in, const Heads& out, const float* cosines, const float* sines,
                    int64_t begin, int64_t end) {
  with_dtype(shape.dtype,
             [&]<class T>(std::type_identity<T>) { turn_positions<T>(shape, in, out, cosines, sines, begin, end); });
}

template void rope_positions<Compiled>(const RopeShape&, const Heads&, const Heads&, const float*, const float*,
                                       int64_t, int64_t);

}  // namespace timelyfreeze::kernels
