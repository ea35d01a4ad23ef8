#pragma once
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/action.h"

namespace timelyfreeze {

// Index of an action in its program: rank 0's actions first, in order, then rank 1's, and so on.
using ActionId = int32_t;

struct Instruction {
  Action action;
  ActionId id = 0;
  std::vector<ActionId> waits_for;  // actions of other ranks whose results this one reads
  std::vector<int32_t> notifies;    // ranks that read this one's result
};

// What every rank does in one step, in order. Immutable; shared by all the workers that run it.
class Program {
 public:
  // `edges` are the data dependencies (before, after). Throws std::invalid_argument where an edge names no action or
  // where the ranks would wait for each other for ever.
  Program(const std::vector<std::vector<Action>>& ranks, const std::vector<std::pair<ActionId, ActionId>>& edges);

  [[nodiscard]] int32_t num_ranks() const { return static_cast<int32_t>(ranks_.size()); }
  [[nodiscard]] int32_t num_actions() const { return num_actions_; }
  [[nodiscard]] const std::vector<Instruction>& rank(int32_t index) const { return ranks_[static_cast<size_t>(index)]; }
  [[nodiscard]] const Instruction& at(ActionId id) const;
  [[nodiscard]] int32_t rank_of(ActionId id) const { return rank_of_[static_cast<size_t>(id)]; }

 private:
  void check_executable() const;

  std::vector<std::vector<Instruction>> ranks_;
  std::vector<int32_t> rank_of_;
  std::vector<int32_t> index_in_rank_;
  int32_t num_actions_ = 0;
};

}  // namespace timelyfreeze
