#include "runtime/weight_prediction.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/sub.h>
#include <torch/csrc/autograd/variable.h>

namespace timelyfreeze {

int64_t WeightPrediction::before_update(const std::vector<at::Tensor>& parameters) {
  const at::NoGradGuard no_grad;
  values_.clear();  // user code may have given a parameter other memory
  for (const at::Tensor& parameter : parameters) {
    if (parameter.requires_grad()) values_.push_back(parameter.variable_data());
  }
  const bool is_first = kept_.empty();
  if (is_first) {
    for (const at::Tensor& value : values_) kept_.push_back(value.clone());
  } else {
    for (size_t i = 0; i < values_.size(); ++i) kept_[i].copy_(values_[i]);
  }
  return is_first && !values_.empty() ? 2 : 0;
}

void WeightPrediction::after_update() {
  const at::NoGradGuard no_grad;
  if (last_update_.empty()) {
    for (size_t i = 0; i < values_.size(); ++i) last_update_.push_back(values_[i].sub(kept_[i]));
    return;
  }
  for (size_t i = 0; i < values_.size(); ++i) at::sub_out(last_update_[i], values_[i], kept_[i]);
}

WeightPrediction::Guard::Guard(const WeightPrediction& prediction, int64_t num_updates)
    : prediction_(prediction), moves_(num_updates > 0 && !prediction.last_update_.empty()) {
  if (!moves_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < prediction_.values_.size(); ++i) {
    prediction_.kept_[i].copy_(prediction_.values_[i]);
    prediction_.values_[i].add_(prediction_.last_update_[i], num_updates);
  }
}

WeightPrediction::Guard::~Guard() {
  if (!moves_) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < prediction_.values_.size(); ++i) prediction_.values_[i].copy_(prediction_.kept_[i]);
}

}  // namespace timelyfreeze
