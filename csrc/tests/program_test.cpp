#include "core/program.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "tests/check.h"
#include "tests/schedules.h"

namespace timelyfreeze::testing {
namespace {

template <class Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return {};
}

TEST(actions_are_written_as_torch_writes_them) {
  CHECK(to_string({1, Kind::backward, 3}) == "1B3");
  CHECK(to_string({12, Kind::weight_grad, 0}) == "12W0");
}

TEST(waits_and_notifications_cross_ranks_only) {
  // rank 0 | 0F0         0B0
  // rank 1 |     1F0 1B0
  const Program program = make_program(2, 1);
  CHECK(program.num_actions() == 4);
  CHECK(program.rank(0)[0].waits_for.empty() && program.rank(0)[0].notifies == std::vector<int32_t>{1});
  CHECK(program.rank(0)[1].waits_for == std::vector<ActionId>{3});
  CHECK(program.rank(1)[0].waits_for == std::vector<ActionId>{0} && program.rank(1)[0].notifies.empty());
  CHECK(to_string(program.at(3).action) == "1B0" && program.rank_of(3) == 1);
}

TEST(ranks_that_wait_for_each_other_are_refused) {
  auto broken = one_forward_one_backward(2, 1);
  std::swap(broken[0][0], broken[0][1]);  // 0B0 waits for 1B0, which waits for 0F0 behind it
  CHECK(message_of([&] { Program(broken, data_edges(broken)); }) == "rank 0 would wait for ever at 0B0");
}

TEST(edges_must_name_actions_and_respect_the_ranks_own_order) {
  const auto ranks = one_forward_one_backward(2, 1);
  CHECK(message_of([&] { Program(ranks, {{0, 9}}); }) == "edge 0 -> 9: expected two action ids below 4");
  CHECK(message_of([&] { Program(ranks, {{1, 0}}); }) == "0F0 stands before 0B0, which it needs");
}

}  // namespace
}  // namespace timelyfreeze::testing
