#include "runtime/pipeline.h"

#include <chrono>
#include <stdexcept>

#include "runtime/errors.h"
#include "runtime/step.h"

namespace py = pybind11;

namespace timelyfreeze {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Python handles signals between bytecodes of the main thread only, so a caller that waits has to look for them.
constexpr milliseconds kSignalPoll{50};
// User code that runs on after a cancellation is interrupted after the first, given up on after the second.
constexpr milliseconds kInterruptAfter{300};
constexpr milliseconds kGiveUpAfter{5000};

}  // namespace

Pipeline::Pipeline(std::vector<std::shared_ptr<Stage>> stages, const std::vector<int32_t>& stage_to_rank,
                   const std::vector<c10::Device>& devices)
    : stages_(std::move(stages)),
      stage_to_rank_(stage_to_rank),
      thread_ids_(devices.size()),
      workers_(static_cast<int32_t>(devices.size())),
      differentiable_inputs_(stages_.size()) {
  for (const c10::Device& device : devices) devices_.emplace_back(device);
  if (stages_.empty() || stage_to_rank_.size() != stages_.size()) {
    throw std::invalid_argument("expected one rank for each of " + std::to_string(stages_.size()) + " stages, got " +
                                std::to_string(stage_to_rank_.size()));
  }
  for (const int32_t rank : stage_to_rank_) {
    if (rank < 0 || rank >= static_cast<int32_t>(devices_.size())) {
      throw std::invalid_argument("expected ranks below " + std::to_string(devices_.size()) + ", got " +
                                  std::to_string(rank));
    }
  }
}

void Pipeline::work(int32_t rank) {
  thread_ids_.at(static_cast<size_t>(rank)) = PyThread_get_thread_ident();
  const py::gil_scoped_release no_gil;
  workers_.work(rank);
}

// Waits for user code of a cancelled step that had been given up on.
void Pipeline::settle() {
  if (!stuck_) return;
  bool idle = false;
  {
    const py::gil_scoped_release no_gil;
    idle = workers_.wait_idle_for(kGiveUpAfter);
  }
  if (!idle) {
    throw std::runtime_error(
        "a stage still runs user code of a step that was cancelled. Make that code return, or start a new process.");
  }
  take_back_interrupts();
  stuck_.reset();
  abort();
}

StepReport Pipeline::run(StepRequest request) {
  settle();
  if (open_step_) abort();
  auto step = std::make_shared<Step>(*this, std::move(request));
  if (step->request.train) {
    for (const auto& stage : stages_) stage->begin_step();
    open_step_ = true;
  }
  const int32_t num_active = step->request.run_inline ? 1 : static_cast<int32_t>(devices_.size());
  const double timeout_s = step->request.timeout_s;
  const bool started = workers_.start([step](int32_t rank) { step->work(rank); }, num_active);
  if (!started) {
    abort();
    throw std::runtime_error(
        "the pipeline is closed or a step is running on another thread. Call step() from one thread.");
  }
  wait(*step, timeout_s);
  if (!step->cancel.cancelled()) step->finish();
  StepReport report;
  if (!step->cancel.cancelled()) {
    report = step->report();
  } else {
    const Failure failure = step->cancel.failure();
    report.failed = failure.id;
    report.error = to_python(failure.error);
    bool idle = false;
    {
      const py::gil_scoped_release no_gil;
      idle = workers_.wait_idle_for(milliseconds(0));
    }
    if (idle) {
      if (step->request.train) abort();
    } else {
      stuck_ = step;
    }
  }
  return report;
}

// Until the step is idle, or was cancelled and its user code does not come back.
void Pipeline::wait(Step& step, double timeout_s) {
  const auto begin = Clock::now();
  std::optional<Clock::time_point> cancelled_at;
  bool interrupted = false;
  const auto stop = [&](std::exception_ptr error) {
    step.cancel.cancel(std::nullopt, std::move(error));
    step.execution.wake_all();
  };
  for (;;) {
    {
      const py::gil_scoped_release no_gil;
      if (workers_.wait_idle_for(kSignalPoll)) break;
    }
    const auto now = Clock::now();
    if (PyErr_CheckSignals() != 0) stop(std::make_exception_ptr(py::error_already_set()));
    if (std::chrono::duration<double>(now - begin).count() > timeout_s && !step.cancel.cancelled()) {
      PyErr_Format(PyExc_TimeoutError,
                   "the step did not end within timeout_s=%d s. Raise timeout_s, or look for user code that hangs.",
                   static_cast<int>(timeout_s));
      stop(std::make_exception_ptr(py::error_already_set()));
    }
    if (!step.cancel.cancelled()) continue;
    if (!cancelled_at) cancelled_at = now;
    if (!interrupted && now - *cancelled_at > kInterruptAfter) {
      interrupted = true;
      for (const auto& id : thread_ids_) PyThreadState_SetAsyncExc(id, PyExc_KeyboardInterrupt);
    }
    if (now - *cancelled_at > kGiveUpAfter) return;
  }
  if (interrupted) take_back_interrupts();
}

// Interrupts that were not delivered would come up in a later step.
void Pipeline::take_back_interrupts() {
  for (const auto& id : thread_ids_) PyThreadState_SetAsyncExc(id, nullptr);
}

void Pipeline::commit(const std::vector<std::vector<double>>& factors) {
  if (!open_step_) return;
  const py::gil_scoped_release no_gil;
  for (size_t i = 0; i < stages_.size(); ++i) stages_[i]->commit_step(factors.at(i));
  open_step_ = false;
}

void Pipeline::abort() {
  if (!open_step_) return;
  for (const auto& stage : stages_) stage->abort_step();
  open_step_ = false;
}

void Pipeline::close() {
  take_back_interrupts();
  const py::gil_scoped_release no_gil;
  workers_.close();
}

}  // namespace timelyfreeze
