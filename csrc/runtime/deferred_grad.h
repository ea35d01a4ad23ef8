#pragma once
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "ops/autocast.h"
#include "runtime/stage.h"
#include "runtime/weight_queue.h"

namespace timelyfreeze {

// While it lives, backward leaves the gradients of `stage`'s weights in matrix products, convolutions and embeddings
// that run on this thread to `queue`. Around a forward it makes them so; around a backward it does for what is
// recomputed there. (What a thread knows of itself here follows it to the engine's threads, as c10's thread-local state
// does.)
//
// Left to autograd, so that their whole backward runs where it is called: whatever is no such operator; weights that do
// not require grad, are no parameters of the stage (a cast or a transposition of one aside), or have hooks, which must
// see their gradient; wrapped tensors (tracing, torch.func) and dual ones; all in anomaly mode; gradients that
// torch.autograd.grad asks for, or that backward() is called for in the midst of a forward.
class DeferScope {
 public:
  // A null queue defers nothing.
  DeferScope(const std::shared_ptr<WeightQueue>& queue, const Stage& stage);

 private:
  c10::DebugInfoGuard guard_;
};

// Where weight gradients wait on this thread now, and whose; null outside a DeferScope.
struct DeferTarget : c10::DebugInfoBase {
  DeferTarget(std::shared_ptr<WeightQueue> its_queue, const Stage& its_stage)
      : queue(std::move(its_queue)), stage(its_stage) {}
  const std::shared_ptr<WeightQueue> queue;
  const Stage& stage;
};
const DeferTarget* defer_target();

// Neither wrapped nor lazy nor dual: what runs on it runs now, on memory of its own, and has no tangent to carry on.
bool is_plain(const at::Tensor& tensor);
// Whether a node of our own may stand for an operator on `input`: nobody looks over autograd's shoulder.
bool may_record(const at::Tensor& input);

// Registers the operators; called once when the module is loaded, after register_random_operators.
void register_deferred_operators();

}  // namespace timelyfreeze
