#pragma once
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace timelyfreeze {

// Counts, for every micro-batch and stage, how many optimizer updates of the stage fell between its forward and its
// backward, and proves that they are no more than the order allows.
class AsyncLedger {
 public:
  struct StageEntry {
    int64_t num_updates = 0;
    int64_t num_skipped = 0;                  // updates that the optimizer was not let do
    int64_t bound = 0;                        // the most drift that the order allows
    std::map<int64_t, int64_t> microbatches;  // drift -> how many had it
    std::vector<int32_t> last;                // the drift of the last micro-batches, a ring: kLast of them at the most
    int64_t num_backwards = 0;
  };
  static constexpr int64_t kLast = 1024;

  AsyncLedger(int64_t num_stages, int64_t accumulation);

  void count_update(int32_t stage, bool applied);
  [[nodiscard]] int64_t num_updates(int32_t stage) const;
  // Throws std::logic_error where the bound is broken.
  void count_backward(int32_t stage, int64_t drift);
  void count_copy() { ++num_weight_copies_; }
  [[nodiscard]] int64_t num_weight_copies() const { return num_weight_copies_; }
  [[nodiscard]] std::vector<StageEntry> entries() const;

 private:
  mutable std::mutex mutex_;
  std::vector<StageEntry> entries_;
  std::atomic<int64_t> num_weight_copies_{0};
};

}  // namespace timelyfreeze
