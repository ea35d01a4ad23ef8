#include "runtime/interrupts.h"

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

}  // namespace timelyfreeze
