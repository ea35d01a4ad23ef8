#include "kernels/cuda/common.cuh"
#include "kernels/rope.h"

// Formulas, sources and bytes moved: kernels/rope.h. A thread turns the same pairs of a few heads, so that what it read
// of the tables serves them all.
namespace timelyfreeze::kernels {
namespace {

// One array [batch, heads, length, width] as kernels see it.
template <typename T>
struct Strided {
  T* data;
  int64_t batch_step, head_step, position_step;

  explicit Strided(const Heads& heads)
      : data(static_cast<T*>(const_cast<void*>(heads.data))),
        batch_step(heads.batch_step),
        head_step(heads.head_step),
        position_step(heads.position_step) {}

  __device__ T* row(int64_t batch, int64_t head, int64_t position) const {
    return data + batch * batch_step + head * head_step + position * position_step;
  }
};

// Packs `low` (features i ...) and `high` (features i + half ...) of one head's position.
template <typename T, int N>
struct Pair {
  Pack<T, N> low, high;
};

// In place each thread has read what it writes. Without tables features keep their values, bit for bit.
template <typename T, int N>
__global__ void __launch_bounds__(tuning::kRopeThreads, tuning::kRopeBlocksPerSm)
    rope_kernel(RopeShape shape, Strided<T> in, Strided<T> out, const float* cosines, const float* sines) {
  constexpr int kHeads = tuning::kRopeHeadsPerThread;
  const int64_t half = shape.width / 2;
  const int64_t i = (static_cast<int64_t>(blockIdx.z) * blockDim.x + threadIdx.x) * N;
  if (i >= half) return;
  for (int64_t at = first_row(); at < shape.batch * shape.length; at += row_step()) {
    const int64_t batch = at / shape.length;
    const int64_t position = at % shape.length;
    Pack<float, N> cosine, sine;
    if (cosines != nullptr) {
      cosine = load<N>(cosines, (shape.offset + position) * half + i);
      sine = load<N>(sines, (shape.offset + position) * half + i);
      if (shape.inverse) for_each<N>([&](int k) { sine.set(k, -sine[k]); });
    }
    for (int64_t head = static_cast<int64_t>(blockIdx.y) * kHeads; head < shape.heads; head += gridDim.y * kHeads) {
      Pair<T, N> pairs[kHeads];
      for_each<kHeads>([&](int slot) {
        if (head + slot >= shape.heads) return;
        const T* row = in.row(batch, head + slot, position);
        pairs[slot] = {load<N>(row, i), load<N>(row, half + i)};
      });
      for_each<kHeads>([&](int slot) {
        if (head + slot >= shape.heads) return;
        Pair<T, N> turned = pairs[slot];
        if (cosines != nullptr) {
          for_each<N>([&](int k) {
            const float low = pairs[slot].low[k];
            const float high = pairs[slot].high[k];
            turned.low.set(k, low * cosine[k] - high * sine[k]);
            turned.high.set(k, high * cosine[k] + low * sine[k]);
          });
        }
        T* row = out.row(batch, head + slot, position);
        store(row, i, turned.low);
        store(row, half + i, turned.high);
      });
    }
  }
}

}  // namespace

void rope_cuda(const RopeShape& shape, const Heads& in, const Heads& out, const float* cosines, const float* sines,
               Stream stream) {
  const int64_t half = shape.width / 2;
  if (shape.batch == 0 || shape.heads == 0 || shape.length == 0 || half == 0) return;
  check_row(shape.width);
  // A pack may begin at any of these: all multiples of a pack's size, or none is used.
  const int64_t steps =
      half | in.batch_step | in.head_step | in.position_step | out.batch_step | out.head_step | out.position_step;
  with_pack(shape.dtype, aligned({in.data, out.data, cosines, sines}), steps, [&]<typename T, int N>() {
    unsigned width = 1;
    while (width < half / N && width < tuning::kRopeThreads) width *= 2;
    const dim3 block(width, tuning::kRopeThreads / width);
    const auto blocks = [](int64_t count, int64_t by) {
      return static_cast<unsigned>(std::min(divide_up(count, by), tuning::kMaxBlocks));
    };
    const dim3 grid(blocks(shape.batch * shape.length, block.y), blocks(shape.heads, tuning::kRopeHeadsPerThread),
                    blocks(half / N, block.x));
    launch(&rope_kernel<T, N>, grid, block, stream, shape, Strided<T>(in), Strided<T>(out), cosines, sines);
  });
}

}  // namespace timelyfreeze::kernels
