#pragma once
#include <atomic>
#include <chrono>
#include <vector>

#include "runtime/worker_group.h"

namespace timelyfreeze {

// Python handles signals between bytecodes of the main thread only, so a caller that waits has to look for them.
constexpr std::chrono::milliseconds kSignalPoll{50};
// User code that runs on after a cancellation is interrupted after the first, given up on after the second.
constexpr std::chrono::milliseconds kInterruptAfter{300};
constexpr std::chrono::milliseconds kGiveUpAfter{5000};

using ThreadIds = std::vector<std::atomic<unsigned long>>;

// Interrupts that were not delivered would come up in a later step.
void take_back_interrupts(const ThreadIds& thread_ids);

// After a cancellation: whether the workers came back, interrupted where they did not by themselves. Releases the
// interpreter lock, which it needs.
bool wait_or_interrupt(WorkerGroup& workers, const ThreadIds& thread_ids);

// Waits for user code that had been given up on; throws where it still does not come back. Likewise.
void wait_for_stuck(WorkerGroup& workers, const ThreadIds& thread_ids);

}  // namespace timelyfreeze
