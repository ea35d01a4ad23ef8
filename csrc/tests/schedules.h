#pragma once
#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "core/program.h"

namespace timelyfreeze::testing {

// One-forward-one-backward: stage s begins with `num_stages - 1 - s` forwards, then alternates.
inline std::vector<std::vector<Action>> one_forward_one_backward(int32_t num_stages, int32_t num_microbatches) {
  std::vector<std::vector<Action>> ranks;
  for (int32_t stage = 0; stage < num_stages; ++stage) {
    auto& order = ranks.emplace_back();
    int32_t forward = 0;
    for (; forward < std::min(num_stages - 1 - stage, num_microbatches); ++forward) {
      order.push_back({stage, Kind::forward, forward});
    }
    for (int32_t backward = 0; backward < num_microbatches; ++backward) {
      if (forward < num_microbatches) order.push_back({stage, Kind::forward, forward++});
      order.push_back({stage, Kind::backward, backward});
    }
  }
  return ranks;
}

// What each action of such ranks reads from other ranks.
inline std::vector<std::pair<ActionId, ActionId>> data_edges(const std::vector<std::vector<Action>>& ranks) {
  std::map<std::tuple<int32_t, Kind, int32_t>, ActionId> ids;
  ActionId next = 0;
  for (const auto& order : ranks) {
    for (const Action& a : order) ids[{a.stage, a.kind, a.microbatch}] = next++;
  }
  std::vector<std::pair<ActionId, ActionId>> edges;
  for (const auto& [key, id] : ids) {
    const auto [stage, kind, microbatch] = key;
    const int32_t neighbour = kind == Kind::forward ? stage - 1 : stage + 1;
    if (const auto before = ids.find({neighbour, kind, microbatch}); before != ids.end()) {
      edges.emplace_back(before->second, id);
    }
  }
  return edges;
}

inline Program make_program(int32_t num_stages, int32_t num_microbatches) {
  const auto ranks = one_forward_one_backward(num_stages, num_microbatches);
  return {ranks, data_edges(ranks)};
}

}  // namespace timelyfreeze::testing
