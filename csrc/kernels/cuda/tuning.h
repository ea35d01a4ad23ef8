#pragma once
#include <cstdint>

// Sizes that decide speed and no result but the order of additions, kept apart from the kernels that use them. They are
// reckoned, not measured: enough bytes in flight to hide memory's latency, and registers for it without spills.
namespace timelyfreeze::kernels::tuning {

// Bytes of one access of one thread: the widest that every architecture has.
inline constexpr int kPackBytes = 16;

// Rows that one warp can hold go several to a block, as an SM takes no more than 32 blocks for its 64 warps.
inline constexpr int kNarrowRowsPerBlock = 4;

// Blocks of one launch; further rows are taken in turn by the same blocks.
inline constexpr int64_t kMaxBlocks = 65535;

// Norms keep this many elements of a row in each thread's registers, and read again what lies beyond threads x elements
// = 8192 columns. A thread may use 65536 / threads registers. Sums for trained weights take two more for each element.
// Where an access is a single element a quarter is kept, as each has an address as well.
inline constexpr int kNormThreads = 1024;
inline constexpr int kNormElements = 8;
inline constexpr int kNormTrainableThreads = 512;
inline constexpr int kNormTrainableElements = 16;

// Blocks that share the rows between them where weights train, each with a partial sum of its own. Two for each of
// the 132 SMs of an H100; fixed, so that the order of additions is the shape's alone.
inline constexpr int64_t kNormPartialBlocks = 264;

inline constexpr int kActivationThreads = 256;

inline constexpr int kRopeThreads = 256;
inline constexpr int kRopeBlocksPerSm = 3;     // so at most 65536 / (3 x 256) = 85 registers
inline constexpr int kRopeHeadsPerThread = 2;  // share what they read of the tables

inline constexpr int kCrossEntropyThreads = 512;

}  // namespace timelyfreeze::kernels::tuning
