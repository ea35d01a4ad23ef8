#include "core/program.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace timelyfreeze {

Program::Program(const std::vector<std::vector<Action>>& ranks,
                 const std::vector<std::pair<ActionId, ActionId>>& edges) {
  ranks_.resize(ranks.size());
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    for (const Action& action : ranks[rank]) {
      index_in_rank_.push_back(static_cast<int32_t>(ranks_[rank].size()));
      rank_of_.push_back(static_cast<int32_t>(rank));
      ranks_[rank].push_back({action, num_actions_++, {}, {}});
    }
  }
  for (const auto& [before, after] : edges) {
    if (before < 0 || before >= num_actions_ || after < 0 || after >= num_actions_) {
      throw std::invalid_argument("edge " + std::to_string(before) + " -> " + std::to_string(after) +
                                  ": expected two action ids below " + std::to_string(num_actions_));
    }
    auto& source = ranks_[rank_of(before)][index_in_rank_[before]];
    auto& sink = ranks_[rank_of(after)][index_in_rank_[after]];
    if (rank_of(before) == rank_of(after)) {
      // The rank's own order keeps this one, or nothing can.
      if (before > after) {
        throw std::invalid_argument(to_string(sink.action) + " stands before " + to_string(source.action) +
                                    ", which it needs");
      }
      continue;
    }
    sink.waits_for.push_back(before);
    if (std::find(source.notifies.begin(), source.notifies.end(), rank_of(after)) == source.notifies.end()) {
      source.notifies.push_back(rank_of(after));
    }
  }
  check_executable();
}

const Instruction& Program::at(ActionId id) const {
  return ranks_[static_cast<size_t>(rank_of_.at(static_cast<size_t>(id)))]
               [static_cast<size_t>(index_in_rank_[static_cast<size_t>(id)])];
}

// Walks the ranks as workers would, in no time: whoever cannot go on here could not at run time either.
void Program::check_executable() const {
  std::vector<size_t> next(ranks_.size(), 0);
  std::vector<bool> done(static_cast<size_t>(num_actions_), false);
  bool progress = true;
  while (progress) {
    progress = false;
    for (size_t rank = 0; rank < ranks_.size(); ++rank) {
      while (next[rank] < ranks_[rank].size()) {
        const Instruction& instruction = ranks_[rank][next[rank]];
        const bool ready = std::all_of(instruction.waits_for.begin(), instruction.waits_for.end(),
                                       [&](ActionId id) { return done[static_cast<size_t>(id)]; });
        if (!ready) break;
        done[static_cast<size_t>(instruction.id)] = true;
        ++next[rank];
        progress = true;
      }
    }
  }
  for (size_t rank = 0; rank < ranks_.size(); ++rank) {
    if (next[rank] < ranks_[rank].size()) {
      throw std::invalid_argument("rank " + std::to_string(rank) + " would wait for ever at " +
                                  to_string(ranks_[rank][next[rank]].action));
    }
  }
}

}  // namespace timelyfreeze
