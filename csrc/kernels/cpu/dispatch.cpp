#include <ATen/Parallel.h>

#include <algorithm>

#include "kernels/cpu/rows.h"

namespace timelyfreeze::kernels {
namespace {

constexpr int64_t min_elements_per_thread = 32768;  // at::internal::GRAIN_SIZE: below, waking a thread costs more
constexpr int64_t min_rows_per_partial = 64;        // the sum of the partial sums stays under 1/64 of the work
constexpr int64_t max_partials = 64;                // as many threads can share a backward with weight gradients

#ifdef __x86_64__
bool has_avx2() {
  static const bool has =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  return has;
}

bool has_avx512() {
  static const bool has = has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has;
}
#endif

// Calls work(instruction_set, begin, end) on parts of [0, count) whose items have `elements` elements each.
template <class Work>
void share_out(int64_t count, int64_t elements, const Work& work) {
  const int64_t grain = std::max<int64_t>(1, min_elements_per_thread / std::max<int64_t>(1, elements));
  at::parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
#ifdef __x86_64__
    if (has_avx512()) return work(Avx512{}, begin, end);
    if (has_avx2()) return work(Avx2{}, begin, end);
#endif
    work(Plain{}, begin, end);
  });
}

}  // namespace

int64_t norm_num_partials_cpu(const NormShape& shape) {
  return std::clamp<int64_t>(shape.rows / min_rows_per_partial, 1, max_partials);
}

void norm_forward_cpu(const NormShape& shape, const NormForward& arrays) {
  share_out(shape.rows, shape.cols,
            [&]<class Set>(Set, int64_t begin, int64_t end) { norm_forward_rows<Set>(shape, arrays, begin, end); });
}

void norm_backward_cpu(const NormShape& shape, const NormBackward& arrays) {
  if (arrays.dweight == nullptr && arrays.dbias == nullptr) {
    share_out(shape.rows, shape.cols,
              [&]<class Set>(Set, int64_t begin, int64_t end) { norm_backward_rows<Set>(shape, arrays, begin, end); });
  } else {
    const int64_t elements = shape.rows * shape.cols / arrays.num_partials;
    share_out(arrays.num_partials, elements, [&]<class Set>(Set, int64_t begin, int64_t end) {
      norm_backward_partials<Set>(shape, arrays, begin, end);
    });
  }
}

void activation_forward_cpu(const ActivationShape& shape, const void* x, void* y) {
  share_out(shape.rows * shape.cols, 1, [&]<class Set>(Set, int64_t begin, int64_t end) {
    activation_forward_elements<Set>(shape, x, y, begin, end);
  });
}

void activation_backward_cpu(const ActivationShape& shape, const void* x, const void* dy, void* dx) {
  share_out(shape.rows * shape.cols, 1, [&]<class Set>(Set, int64_t begin, int64_t end) {
    activation_backward_elements<Set>(shape, x, dy, dx, begin, end);
  });
}

void rope_cpu(const RopeShape& shape, const Heads& in, const Heads& out, const float* cosines, const float* sines) {
  share_out(shape.batch * shape.length, shape.heads * shape.width, [&]<class Set>(Set, int64_t begin, int64_t end) {
    rope_positions<Set>(shape, in, out, cosines, sines, begin, end);
  });
}

void cross_entropy_cpu(const CrossEntropyShape& shape, void* logits, const int64_t* target, void* loss,
                       bool wants_gradient) {
  share_out(shape.rows, shape.cols, [&]<class Set>(Set, int64_t begin, int64_t end) {
    cross_entropy_rows<Set>(shape, logits, target, loss, wants_gradient, begin, end);
  });
}

}  // namespace timelyfreeze::kernels
