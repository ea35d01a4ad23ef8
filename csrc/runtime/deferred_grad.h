#pragma once
#include <c10/util/ThreadLocalDebugInfo.h>

#include <memory>

#include "runtime/weight_queue.h"

namespace timelyfreeze {

// While it lives, backward leaves the weight gradients of matrix products, convolutions and embeddings that run on this
// thread to `queue`. Around a forward it makes them so; around a backward it does for what is recomputed there. (What
// a thread knows of itself here follows it to the engine's threads, as c10's thread-local state does.)
//
// Left to autograd, so that their whole backward runs where it is called: whatever is no such operator; weights that do
// not require grad, are computed from others (a cast or a transposition aside), or have hooks, which must see their
// gradient; wrapped tensors (tracing, torch.func); gradients that torch.autograd.grad asks for.
class DeferScope {
 public:
  // A null queue defers nothing.
  explicit DeferScope(const std::shared_ptr<WeightQueue>& queue);

 private:
  c10::DebugInfoGuard guard_;
};

// Registers the operators; called once when the module is loaded, after register_random_operators.
void register_deferred_operators();

}  // namespace timelyfreeze
