#include "runtime/execution.h"

#include <algorithm>

namespace timelyfreeze {

Execution::Execution(const Program& program, ActionRunner& runner, CancelToken& cancel, EventLog& log)
    : program_(program),
      runner_(runner),
      cancel_(cancel),
      log_(log),
      done_(static_cast<size_t>(program.num_actions())),
      doorbells_(static_cast<size_t>(program.num_ranks())) {}

bool Execution::ready(const Instruction& instruction) const {
  return std::all_of(instruction.waits_for.begin(), instruction.waits_for.end(),
                     [&](ActionId id) { return done_[static_cast<size_t>(id)].load(std::memory_order_acquire); });
}

bool Execution::wait_until_ready(int32_t rank, const Instruction& instruction) {
  std::atomic<uint32_t>& rings = doorbells_[static_cast<size_t>(rank)].rings;
  for (;;) {
    // Read before the check: what happens after the check changes the number, and the wait returns at once.
    const uint32_t seen = rings.load(std::memory_order_acquire);
    if (cancel_.cancelled()) return false;
    if (ready(instruction)) return true;
    rings.wait(seen, std::memory_order_acquire);
  }
}

bool Execution::perform(int32_t rank, const Instruction& instruction) {
  log_.begin(instruction.id);
  try {
    runner_.run(rank, instruction);
  } catch (...) {
    cancel_.cancel(instruction.id, std::current_exception());
    wake_all();
    return false;
  }
  log_.end(instruction.id);
  complete(instruction.id);
  return true;
}

void Execution::complete(ActionId id) {
  done_[static_cast<size_t>(id)].store(true, std::memory_order_release);
  for (const int32_t reader : program_.at(id).notifies) doorbells_[static_cast<size_t>(reader)].ring();
}

void Execution::run_rank(int32_t rank) {
  for (const Instruction& instruction : program_.rank(rank)) {
    if (!wait_until_ready(rank, instruction) || !perform(rank, instruction)) return;
  }
}

void Execution::run_inline() {
  std::vector<size_t> next(static_cast<size_t>(program_.num_ranks()), 0);
  // Program's constructor has proved that a full round always gets somewhere.
  for (bool progress = true; progress;) {
    progress = false;
    for (int32_t rank = 0; rank < program_.num_ranks(); ++rank) {
      const auto& instructions = program_.rank(rank);
      size_t& index = next[static_cast<size_t>(rank)];
      for (; index < instructions.size() && ready(instructions[index]); ++index, progress = true) {
        if (cancel_.cancelled() || !perform(rank, instructions[index])) return;
      }
    }
  }
}

void Execution::wake_all() {
  for (Doorbell& doorbell : doorbells_) doorbell.ring();
}

}  // namespace timelyfreeze
