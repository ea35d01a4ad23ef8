#include "runtime/weight_queue.h"

#include <ATen/Dispatch.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/embedding_dense_backward.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <array>
#include <mutex>
#include <utility>

#include "ops/product.h"

namespace timelyfreeze {
namespace {

bool adds_in_place(const at::Tensor& grad, const at::Tensor& addend) {
  return grad.layout() == at::kStrided && grad.scalar_type() == addend.scalar_type();
}

// As autograd does it: a gradient has its parameter's dtype and, where that is dense, its strides.
at::Tensor laid_out_as(const at::Tensor& parameter, const at::Tensor& gradient) {
  const bool same = gradient.scalar_type() == parameter.scalar_type() && gradient.strides() == parameter.strides();
  if (same || gradient.layout() != at::kStrided || !parameter.is_non_overlapping_and_dense()) {
    return gradient.to(parameter.scalar_type());
  }
  return at::empty_strided(parameter.sizes(), parameter.strides(), parameter.options()).copy_(gradient);
}

void add_rows(at::Tensor& grad, const at::Tensor& indices, const at::Tensor& rows, int64_t padding_index) {
  const at::Tensor flat = indices.reshape({-1}).to(at::kLong);
  const int64_t width = grad.size(1);
  const at::Tensor source = rows.reshape({-1, width}).contiguous();
  const int64_t* row_of = flat.const_data_ptr<int64_t>();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, grad.scalar_type(), "add_rows", [&] {
    auto* to = grad.mutable_data_ptr<scalar_t>();
    const auto* from = source.const_data_ptr<scalar_t>();
    for (int64_t i = 0; i < flat.numel(); ++i, from += width) {
      if (row_of[i] == padding_index) continue;
      scalar_t* row = to + row_of[i] * width;
      for (int64_t j = 0; j < width; ++j) row[j] += from[j];
    }
  });
}

// Several threads may run backward through one weight, as autograd's own accumulation allows.
std::mutex& mutex_of(const at::Tensor& parameter) {
  constexpr size_t kMutexes = 61;  // a prime: addresses are multiples of 16
  static std::array<std::mutex, kMutexes> mutexes;
  return mutexes[reinterpret_cast<uintptr_t>(parameter.unsafeGetTensorImpl()) % kMutexes];
}

void add_to_grad(const at::Tensor& parameter, const at::Tensor& gradient) {
  at::Tensor& grad = parameter.mutable_grad();
  if (!grad.defined()) {
    grad = laid_out_as(parameter, gradient);
  } else if (grad.is_sparse()) {
    grad = gradient + grad;  // dense plus sparse exists, sparse plus dense does not
  } else {
    grad.add_(gradient);
  }
}

}  // namespace

void WeightQueue::push(std::initializer_list<at::Tensor> inputs, Work work) {
  if (!is_open_ || !reserve(inputs)) return work();
  Waiting waiting{std::move(work), inputs, {}};
  for (const at::Tensor& input : inputs) waiting.versions.push_back(input._version());
  const std::lock_guard lock(mutex_);
  waiting_.push_back(std::move(waiting));
}

bool WeightQueue::reserve(std::initializer_list<at::Tensor> inputs) {
  const std::lock_guard lock(mutex_);
  std::vector<const void*> added;
  int64_t bytes = 0;
  for (const at::Tensor& input : inputs) {
    const void* storage = input.storage().unsafeGetStorageImpl();
    if (!storages_.insert(storage).second) continue;
    added.push_back(storage);
    bytes += static_cast<int64_t>(input.storage().nbytes());
  }
  if (pending_.now + bytes > pending_.cap) {
    for (const void* storage : added) storages_.erase(storage);
    return false;
  }
  bytes_ += bytes;
  pending_.now += bytes;
  pending_.peak = std::max(pending_.peak, pending_.now);
  return true;
}

void WeightQueue::run() {
  const at::NoGradGuard no_grad;
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  for (Waiting& next : waiting_) {
    const Waiting waiting = std::exchange(next, {});
    for (size_t i = 0; i < waiting.inputs.size(); ++i) {
      const at::Tensor& input = waiting.inputs[i];
      TORCH_CHECK(input._version() == waiting.versions[i],
                  "a weight gradient that waited for W needs a tensor of shape ", input.sizes(),
                  " that an in-place operation has changed since I: expected version ", waiting.versions[i], ", got ",
                  input._version(), ". Let layers read a copy of it, or use a schedule without W.");
    }
    waiting.work();
  }
  waiting_.clear();
  storages_.clear();
  pending_.now -= std::exchange(bytes_, 0);
}

void accumulate(const at::Tensor& parameter, const at::Tensor& gradient) {
  const std::lock_guard lock(mutex_of(parameter));
  add_to_grad(parameter, gradient);
}

void accumulate_product(const at::Tensor& parameter, const at::Tensor& left, const at::Tensor& right) {
  const std::lock_guard lock(mutex_of(parameter));
  at::Tensor& grad = parameter.mutable_grad();
  if (!grad.defined() || !adds_in_place(grad, left)) {
    add_to_grad(parameter, at::matmul(left, right));
  } else if (left.dim() == 2) {
    grad.addmm_(left, right);
  } else {
    grad.baddbmm_(left, right);
  }
}

void accumulate_fast_product(const at::Tensor& parameter, const at::Tensor& left, const at::Tensor& right) {
  const std::lock_guard lock(mutex_of(parameter));
  at::Tensor& grad = parameter.mutable_grad();
  if (!grad.defined() || !adds_in_place(grad, left)) {
    add_to_grad(parameter, fast_product(left, right));
  } else {
    add_fast_product(grad, left, right);
  }
}

void accumulate_rows(const at::Tensor& parameter, const at::Tensor& indices, const at::Tensor& gradient,
                     int64_t padding_index) {
  const std::lock_guard lock(mutex_of(parameter));
  at::Tensor& grad = parameter.mutable_grad();
  const bool in_place =
      parameter.is_cpu() && gradient.scalar_type() == parameter.scalar_type() && parameter.is_contiguous();
  if (in_place && !grad.defined()) grad = at::zeros_like(parameter);
  if (in_place && adds_in_place(grad, gradient) && grad.is_contiguous()) {
    add_rows(grad, indices, gradient, padding_index);
  } else {
    add_to_grad(parameter,
                at::embedding_dense_backward(gradient, indices, parameter.size(0), padding_index, /*scale=*/false));
  }
}

}  // namespace timelyfreeze
