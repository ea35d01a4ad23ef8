#include "runtime/allocator.h"

#include <cstdlib>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace timelyfreeze {

bool keep_large_blocks() {
#ifdef __GLIBC__
  constexpr int kLargestThreshold = 32 << 20;  // glibc refuses more than half of a thread arena's 64 MiB
  constexpr int kTrimThreshold = 1 << 30;
  return mallopt(M_MMAP_THRESHOLD, kLargestThreshold) == 1 && mallopt(M_TRIM_THRESHOLD, kTrimThreshold) == 1;
#else
  return false;
#endif
}

}  // namespace timelyfreeze
