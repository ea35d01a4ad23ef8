#pragma once
// What the tests of the kernels share: arrays with guarded ends, references in float64, both orders of threads.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

#include "core/check.h"
#include "kernels/simt/machine.h"
#include "kernels/types.h"
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

namespace timelyfreeze::kernels::testing {

inline constexpr std::initializer_list<DType> kDTypes = {DType::f32, DType::bf16, DType::f16};
inline constexpr std::initializer_list<int64_t> kRows = {0, 1, 3, 17};
inline constexpr std::initializer_list<int64_t> kCols = {1, 2, 7, 8, 15, 64, 1000, 4097, 8208};

inline size_t bytes_of(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

// The spacing of the type's numbers about 1: twice the error of one rounding.
inline double spacing(DType dtype) {
  return dtype == DType::bf16 ? std::ldexp(1, -8) : std::ldexp(1, dtype == DType::f16 ? -10 : -20);
}

// `count` elements that begin `misaligned` elements behind a multiple of 64 bytes, between guards that nobody may read
// (AddressSanitizer sees to it) or write (ends_intact sees to it). Elements are NaN until they are set.
class Array {
 public:
  Array(DType dtype, int64_t count, int64_t misaligned = 0)
      : dtype_(dtype),
        count_(count),
        begin_(kGuard + misaligned * bytes_of(dtype)),
        size_((begin_ + count * bytes_of(dtype) + 2 * kGuard) / kGuard * kGuard),
        memory_(static_cast<unsigned char*>(std::aligned_alloc(kGuard, size_))) {
    std::memset(memory_, kGuardByte, size_);
    clear();
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(memory_, begin_);
    __asan_poison_memory_region(memory_ + end(), size_ - end());
#endif
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  ~Array() {
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(memory_, size_);
#endif
    for (size_t i = 0; i < size_; ++i) CHECK((i >= begin_ && i < end()) || memory_[i] == kGuardByte);
    std::free(memory_);
  }

  [[nodiscard]] void* data() { return memory_ + begin_; }
  template <typename T>
  [[nodiscard]] T* as() {
    return reinterpret_cast<T*>(data());
  }
  [[nodiscard]] int64_t count() const { return count_; }
  [[nodiscard]] std::vector<unsigned char> bytes() const { return {memory_ + begin_, memory_ + end()}; }
  void clear() { std::memset(data(), 0xff, end() - begin_); }

  [[nodiscard]] double operator[](int64_t i) const {
    const unsigned char* at = memory_ + begin_ + i * bytes_of(dtype_);
    if (dtype_ == DType::f32) return *reinterpret_cast<const float*>(at);
    if (dtype_ == DType::bf16) return __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(at));
    return __half2float(*reinterpret_cast<const __half*>(at));
  }
  void set(int64_t i, double value) {
    const auto rounded = static_cast<float>(value);
    if (dtype_ == DType::f32) as<float>()[i] = rounded;
    if (dtype_ == DType::bf16) as<__nv_bfloat16>()[i] = __float2bfloat16_rn(rounded);
    if (dtype_ == DType::f16) as<__half>()[i] = __float2half_rn(rounded);
  }
  void randomize(unsigned seed, double scale = 1.0) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal(0.0, scale);
    for (int64_t i = 0; i < count_; ++i) set(i, normal(generator));
  }

  // Within one spacing of the type and 1e-5 of `magnitude`, of what was added up to it.
  void check(int64_t i, double expected, double magnitude = 1.0) const {
    const double got = (*this)[i];
    if (std::fabs(got - expected) <= spacing(dtype_) * std::fabs(expected) + 1e-5 * magnitude) return;
    std::fprintf(stderr, "element %lld of %lld, dtype %d: expected %.9g, got %.9g\n", static_cast<long long>(i),
                 static_cast<long long>(count_), static_cast<int>(dtype_), expected, got);
    std::abort();
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr unsigned char kGuardByte = 0xa5;

  [[nodiscard]] size_t end() const { return begin_ + count_ * bytes_of(dtype_); }

  DType dtype_;
  int64_t count_;
  size_t begin_, size_;
  unsigned char* memory_;
};

// Runs once in each order of threads and checks that every bit of the outputs is the same.
template <typename Run>
void in_both_orders(const Run& run, std::initializer_list<Array*> outputs) {
  std::vector<std::vector<unsigned char>> first;
  for (const simt::Order order : {simt::Order::ascending, simt::Order::descending}) {
    simt::Machine::instance().order = order;
    for (Array* output : outputs) output->clear();
    run();
    size_t i = 0;
    for (Array* output : outputs) {
      if (order == simt::Order::ascending) {
        first.push_back(output->bytes());
      } else {
        CHECK(first[i++] == output->bytes());
      }
    }
  }
}

}  // namespace timelyfreeze::kernels::testing
