#include "runtime/interrupts.h"

#include <stdexcept>

#include "runtime/python_ref.h"

namespace py = pybind11;

namespace timelyfreeze {

void take_back_interrupts(const ThreadIds& thread_ids) {
  for (const auto& id : thread_ids) PyThreadState_SetAsyncExc(id, nullptr);
}

bool wait_or_interrupt(WorkerGroup& workers, const ThreadIds& thread_ids) {
  const auto wait_for = [&](std::chrono::milliseconds timeout) {
    const py::gil_scoped_release no_gil;
    return workers.wait_idle_for(timeout);
  };
  if (wait_for(kInterruptAfter)) return true;
  for (const auto& id : thread_ids) PyThreadState_SetAsyncExc(id, PyExc_KeyboardInterrupt);
  const bool idle = wait_for(kGiveUpAfter - kInterruptAfter);
  if (idle) take_back_interrupts(thread_ids);
  return idle;
}

void wait_for_stuck(WorkerGroup& workers, const ThreadIds& thread_ids) {
  bool idle = false;
  {
    const py::gil_scoped_release no_gil;
    idle = workers.wait_idle_for(kGiveUpAfter);
  }
  if (!idle) {
    throw std::runtime_error(
        "a stage still runs user code that was cancelled. Make that code return, or start a new process.");
  }
  take_back_interrupts(thread_ids);
}

}  // namespace timelyfreeze
