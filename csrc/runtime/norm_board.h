#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <string>
#include <vector>

namespace timelyfreeze {

// Where the stages are processes of their own: the squares of their gradients' norms, an update after the other, as far
// as they are known here. Every packet of a micro-batch tells of each stage's last update, so that nothing is sent for
// them alone and nobody waits. What of it a packet tells is fixed by the order of the stages' actions, not by time, so
// none is missed: a stage makes no two updates between two packets that it sends.
//
// Used by the stage's worker, and by the caller while nothing runs.
class NormBoard {
 public:
  // `capacity`: how many squares of a stage are kept.
  NormBoard(int64_t num_stages, int64_t capacity)
      : stages_(static_cast<size_t>(num_stages)), capacity_(static_cast<size_t>(capacity)) {}

  [[nodiscard]] size_t num_notes() const { return 2 * stages_.size(); }

  void add(int32_t stage, double square) {
    Row& row = stages_.at(static_cast<size_t>(stage));
    row.squares.push_back(square);
    ++row.count;
    if (row.squares.size() > capacity_) row.squares.pop_front();
  }

  // All that is known of a stage: how many there were, and the last of them.
  [[nodiscard]] int64_t count(int32_t stage) const { return stages_.at(static_cast<size_t>(stage)).count; }
  [[nodiscard]] std::vector<double> squares(int32_t stage) const {
    const auto& known = stages_.at(static_cast<size_t>(stage)).squares;
    return {known.begin(), known.end()};
  }
  void set(int32_t stage, int64_t count, const std::vector<double>& squares) {
    stages_.at(static_cast<size_t>(stage)) = {count, {squares.begin(), squares.end()}};
  }

  // Of a stage's update; counted from 0.
  [[nodiscard]] double at(int32_t stage, int64_t index) const {
    const Row& row = stages_.at(static_cast<size_t>(stage));
    const int64_t place = index - row.count + static_cast<int64_t>(row.squares.size());
    if (place < 0 || index >= row.count) {
      throw std::logic_error("the gradient norm of stage " + std::to_string(stage) + " in update " +
                             std::to_string(index) + " is not known here. Please report this.");
    }
    return row.squares[static_cast<size_t>(place)];
  }

  void write(double* notes) const {
    for (const Row& row : stages_) {
      *notes++ = static_cast<double>(row.count);
      *notes++ = row.squares.empty() ? 0.0 : row.squares.back();
    }
  }

  void learn(const double* notes) {
    for (size_t s = 0; s < stages_.size(); ++s, notes += 2) {
      if (static_cast<int64_t>(notes[0]) > stages_[s].count) add(static_cast<int32_t>(s), notes[1]);
    }
  }

 private:
  struct Row {
    int64_t count = 0;
    std::deque<double> squares;
  };
  std::vector<Row> stages_;
  const size_t capacity_;
};

}  // namespace timelyfreeze
