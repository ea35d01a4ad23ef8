#pragma once
// Stacks of their own within one OS thread, switched by hand: a CUDA thread that waits leaves its stack where it is.
#include <cstddef>
#include <cstdlib>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif
#ifndef __x86_64__
#include <ucontext.h>
#endif

namespace timelyfreeze::simt {

#ifdef __x86_64__
// Stores the registers that a call keeps and the stack pointer, and takes up another stack; swapcontext would make two
// system calls a switch, and a block of 512 threads switches thousands of times a row.
extern "C" void timelyfreeze_simt_switch(void** save, void* to);
asm(R"(
.text
.weak timelyfreeze_simt_switch
.type timelyfreeze_simt_switch,@function
timelyfreeze_simt_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp,(%rdi)
  mov %rsi,%rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
.size timelyfreeze_simt_switch,.-timelyfreeze_simt_switch
)");
#endif

class Fiber {
 public:
  Fiber() = default;  // the stack that runs already
  explicit Fiber(void (*entry)()) : stack_(static_cast<char*>(std::aligned_alloc(64, kStackBytes))) {
    size_ = kStackBytes;
#ifdef __x86_64__
    void** top = reinterpret_cast<void**>(stack_ + kStackBytes) - 2;  // keeps the alignment that a call gives
    top[0] = reinterpret_cast<void*>(entry);
    top[1] = nullptr;
    context_ = top - 6;  // the six registers that the first switch takes up
#else
    getcontext(&context_);
    context_.uc_stack.ss_sp = stack_;
    context_.uc_stack.ss_size = kStackBytes;
    context_.uc_link = nullptr;
    makecontext(&context_, entry, 0);
#endif
  }
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  // Goes on with `to`; returns when someone switches back.
  void switch_to(Fiber& to) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&fake_stack_, to.stack_, to.size_);
#endif
#ifdef __x86_64__
    timelyfreeze_simt_switch(&context_, to.context_);
#else
    swapcontext(&context_, &to.context_);
#endif
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(fake_stack_, nullptr, nullptr);
#endif
  }

  // The first thing that runs on a new stack; `from` is the stack that ran before.
  static void begin([[maybe_unused]] Fiber& from) {
#ifdef __SANITIZE_ADDRESS__
    const void* stack = nullptr;
    __sanitizer_finish_switch_fiber(nullptr, &stack, &from.size_);
    from.stack_ = static_cast<char*>(const_cast<void*>(stack));
#endif
  }

 private:
  static constexpr size_t kStackBytes = 64 << 10;

#ifdef __x86_64__
  void* context_ = nullptr;
#else
  ucontext_t context_;
#endif
  char* stack_ = nullptr;  // never freed: fibers are used again until the process ends
  size_t size_ = 0;
#ifdef __SANITIZE_ADDRESS__
  void* fake_stack_ = nullptr;
#endif
};

}  // namespace timelyfreeze::simt
