#include "runtime/async_ledger.h"

#include <stdexcept>

namespace timelyfreeze {

AsyncLedger::AsyncLedger(int64_t num_stages, int64_t accumulation) : entries_(static_cast<size_t>(num_stages)) {
  // N-1-s backwards of other micro-batches lie between a micro-batch's own two, and an update after every
  // `accumulation`-th.
  for (int64_t s = 0; s < num_stages; ++s) {
    entries_[static_cast<size_t>(s)].bound = (num_stages - 1 - s + accumulation - 1) / accumulation;
  }
}

void AsyncLedger::count_update(int32_t stage, bool applied) {
  const std::lock_guard lock(mutex_);
  StageEntry& entry = entries_[static_cast<size_t>(stage)];
  ++(applied ? entry.num_updates : entry.num_skipped);
}

int64_t AsyncLedger::num_updates(int32_t stage) const {
  const std::lock_guard lock(mutex_);
  return entries_[static_cast<size_t>(stage)].num_updates;
}

void AsyncLedger::count_backward(int32_t stage, int64_t drift) {
  const std::lock_guard lock(mutex_);
  StageEntry& entry = entries_[static_cast<size_t>(stage)];
  ++entry.microbatches[drift];
  const int64_t place = entry.num_backwards++ % kLast;
  if (place < static_cast<int64_t>(entry.last.size())) {
    entry.last[static_cast<size_t>(place)] = static_cast<int32_t>(drift);
  } else {
    entry.last.push_back(static_cast<int32_t>(drift));
  }
  if (drift <= entry.bound) return;
  throw std::logic_error("stage " + std::to_string(stage) + " made " + std::to_string(drift) +
                         " updates between a micro-batch's forward and backward: expected " +
                         std::to_string(entry.bound) + " at the most. Please report this.");
}

std::vector<AsyncLedger::StageEntry> AsyncLedger::entries() const {
  const std::lock_guard lock(mutex_);
  std::vector<StageEntry> copied = entries_;
  for (StageEntry& entry : copied) {
    // The oldest first.
    const auto turn = static_cast<std::ptrdiff_t>(entry.num_backwards % kLast);
    if (entry.num_backwards <= kLast) continue;
    std::vector<int32_t> turned(entry.last.begin() + turn, entry.last.end());
    turned.insert(turned.end(), entry.last.begin(), entry.last.begin() + turn);
    entry.last = std::move(turned);
  }
  return copied;
}

}  // namespace timelyfreeze
