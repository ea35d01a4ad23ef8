#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKey.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <cstdint>

namespace timelyfreeze {

// Included on a stage's thread while an action runs. torch keeps this key free for modes of extensions and tests; it
// stands before autocast and autograd.
constexpr auto kActionKey = c10::DispatchKey::TESTING_ONLY_GenericMode;

// Mixes its arguments into a seed; the same everywhere (splitmix64).
uint64_t mix_seed(uint64_t seed, uint64_t step, uint64_t stage, uint64_t kind, uint64_t microbatch);

// While it lives, random operators on this thread draw from a stream of numbers that depends on `seed` alone.
//
// The CPU's default generator is one for the process, so stages on threads would draw from it in no fixed order. Here
// every ATen operator with a generator argument gets this thread's generator where the caller named none. It is seeded
// on first use, so stages that draw nothing pay nothing. An accelerator has a default generator a device, which is
// seeded instead (activation checkpointing saves and restores that one).
class ActionRng {
 public:
  ActionRng(uint64_t seed, c10::Device device);
  ~ActionRng();
  ActionRng(const ActionRng&) = delete;
  ActionRng& operator=(const ActionRng&) = delete;

 private:
  c10::impl::IncludeDispatchKeyGuard intercept_;
};

// The calling thread's own generator while an action runs on it, else an undefined one. Python's
// torch.get_rng_state and set_rng_state are led to it, so that recomputation sees what forward saw.
at::Generator action_generator();

// Registers the operators; called once when the module is loaded.
void register_random_operators();

}  // namespace timelyfreeze
