#include "runtime/rng.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/library.h>

#include <memory>
#include <mutex>
#include <vector>

namespace timelyfreeze {
namespace {

struct ThreadRng {
  bool active = false;
  bool seeded = false;
  uint64_t seed = 0;
  at::Generator generator;
};

thread_local ThreadRng thread_rng;

bool is_generator_argument(const c10::Argument& argument) {
  const auto optional = argument.type()->cast<c10::OptionalType>();
  return optional && optional->getElementType()->kind() == c10::TypeKind::GeneratorType;
}

// Whether the call works on CPU tensors: by its first tensor, else by its device argument, which defaults to CPU.
bool runs_on_cpu(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  const size_t first = stack.size() - schema.arguments().size();
  bool cpu = true;
  for (size_t i = first; i < stack.size(); ++i) {
    if (stack[i].isTensor()) return !stack[i].toTensor().defined() || stack[i].toTensor().is_cpu();
    if (stack[i].isDevice()) cpu = stack[i].toDevice().is_cpu();
  }
  return cpu;
}

void draw_from_action(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard below(kActionKey);
  const auto& arguments = op.schema().arguments();
  // Tracers (torch.compile, fake tensors) must see the call as the user wrote it.
  if (!c10::impl::TorchDispatchModeTLS::any_modes_set() && runs_on_cpu(op.schema(), *stack)) {
    for (size_t i = 0; i < arguments.size(); ++i) {
      auto& value = (*stack)[stack->size() - arguments.size() + i];
      if (is_generator_argument(arguments[i]) && value.isNone()) value = action_generator();
    }
  }
  op.callBoxed(stack);
}

}  // namespace

uint64_t mix_seed(uint64_t seed, uint64_t step, uint64_t stage, uint64_t kind, uint64_t microbatch) {
  uint64_t state = 0;
  for (const uint64_t part : {seed, step, stage, kind, microbatch}) {
    state += part + 0x9e3779b97f4a7c15ULL;
    state = (state ^ (state >> 30)) * 0xbf58476d1ce4e5b9ULL;
    state = (state ^ (state >> 27)) * 0x94d049bb133111ebULL;
    state ^= state >> 31;
  }
  return state;
}

ActionRng::ActionRng(uint64_t seed, c10::Device device) : intercept_(kActionKey) {
  thread_rng.active = true;
  thread_rng.seeded = false;
  thread_rng.seed = seed;
  if (!device.is_cpu()) {
    auto generator = at::globalContext().defaultGenerator(device);
    const std::lock_guard lock(generator.mutex());
    generator.set_current_seed(seed);
  }
}

ActionRng::~ActionRng() { thread_rng.active = false; }

at::Generator action_generator() {
  if (!thread_rng.active) return {};
  if (!thread_rng.generator.defined()) thread_rng.generator = at::detail::createCPUGenerator();
  if (!thread_rng.seeded) {
    const std::lock_guard lock(thread_rng.generator.mutex());
    thread_rng.generator.set_current_seed(thread_rng.seed);
    thread_rng.seeded = true;
  }
  return thread_rng.generator;
}

void register_random_operators() {
  // Lives as long as the process: the dispatcher outlives every module.
  static auto* libraries = new std::vector<std::unique_ptr<torch::Library>>();
  static std::once_flag once;
  std::call_once(once, [] {
    auto fallback = std::make_unique<torch::Library>(torch::Library::IMPL, "_", kActionKey, __FILE__, __LINE__);
    fallback->fallback(torch::CppFunction::makeFallthrough());
    libraries->push_back(std::move(fallback));
    auto aten = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", kActionKey, __FILE__, __LINE__);
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
      if (name.getNamespace() != "aten") continue;
      const auto op = c10::Dispatcher::singleton().findSchema(name);
      if (!op) continue;
      for (const auto& argument : op->schema().arguments()) {
        if (!is_generator_argument(argument)) continue;
        const std::string full = name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
        aten->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&draw_from_action>());
        break;
      }
    }
    libraries->push_back(std::move(aten));
  });
}

}  // namespace timelyfreeze
