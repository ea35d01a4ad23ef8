#pragma once
#include <ATen/core/Tensor.h>

#include <vector>

namespace timelyfreeze {

// Lets forward see the weights that its backward is expected to find: those of now, and the last update once more for
// each update that will fall between the two (SpecTrain, arXiv 1809.02839, section 3.3, with the optimizer's own step
// in place of momentum). Of one stage; holds two copies of its weights.
class WeightPrediction {
 public:
  // Around an update. Returns how many copies it had to make room for.
  int64_t before_update(const std::vector<at::Tensor>& parameters);
  void after_update();

  // While it lives, the parameters are ahead by `num_updates`. Graphs that hold them do not notice.
  class Guard {
   public:
    Guard(const WeightPrediction& prediction, int64_t num_updates);
    ~Guard();
    Guard(const Guard&) = delete;
    Guard& operator=(const Guard&) = delete;

   private:
    const WeightPrediction& prediction_;
    const bool moves_;
  };

 private:
  std::vector<at::Tensor> values_;       // the parameters' memory, with version counters of their own
  std::vector<at::Tensor> last_update_;  // or nothing yet
  std::vector<at::Tensor> kept_;         // the weights before an update, and while they are ahead
};

}  // namespace timelyfreeze
