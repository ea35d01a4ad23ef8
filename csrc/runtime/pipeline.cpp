#include "runtime/pipeline.h"

#include <chrono>
#include <stdexcept>

#include "runtime/errors.h"
#include "runtime/interrupts.h"
#include "runtime/step.h"

namespace py = pybind11;

namespace timelyfreeze {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

}  // namespace

Pipeline::Pipeline(std::vector<std::shared_ptr<Stage>> stages, const std::vector<int32_t>& stage_to_rank,
                   const std::vector<c10::Device>& devices, std::optional<int32_t> own_rank)
    : stages_(std::move(stages)),
      stage_to_rank_(stage_to_rank),
      own_rank_(own_rank),
      thread_ids_(own_rank ? 1 : devices.size()),
      workers_(static_cast<int32_t>(thread_ids_.size())),
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

void Pipeline::connect(std::shared_ptr<Transport> transport, std::vector<int32_t> peers) {
  // User code that was given up on still has the old transport, and would send on the new one when it comes back.
  settle();
  transport_ = std::move(transport);
  peers_ = std::move(peers);
}

void Pipeline::set_clock(double timeout_s) {
  run_job([this] { transport_->set_clock(); }, timeout_s);
}

std::vector<std::string> Pipeline::exchange(const std::string& own, double timeout_s) {
  std::vector<std::string> all;
  run_job([&] { all = transport_->exchange(own); }, timeout_s);
  return all;
}

std::vector<Parcel> Pipeline::transfer(const std::vector<Parcel>& parcels, const std::vector<int32_t>& sources,
                                       double timeout_s) {
  std::vector<Parcel> received;
  const auto job = [&] {
    for (const Parcel& parcel : parcels) {
      Packet packet{{}, {}, parcel.text, {}};
      for (const auto& tensor : parcel.tensors) packet.tensors.push_back(tensor ? tensor->detach() : at::Tensor());
      transport_->send(parcel.peer, -1, packet);
    }
    for (const int32_t source : sources) {
      Arrival arrival = transport_->receive(source);
      if (arrival.arrived) arrival.arrived->synchronize();
      Parcel& parcel = received.emplace_back(Parcel{source, {}, std::move(arrival.packet.spec)});
      for (at::Tensor& tensor : arrival.packet.tensors) {
        parcel.tensors.push_back(tensor.defined() ? std::optional(std::move(tensor)) : std::nullopt);
      }
    }
    transport_->flush();
  };
  run_job(job, timeout_s);
  return received;
}

// The worker does it, so that the caller can look for signals meanwhile.
void Pipeline::run_job(const std::function<void()>& job, double timeout_s) {
  settle();
  CancelToken token;
  const auto guarded = [&](int32_t) {
    try {
      job();
    } catch (...) {
      token.cancel(std::nullopt, std::current_exception());
    }
  };
  if (!workers_.start(guarded, 1)) throw std::runtime_error("the pipeline is closed or busy.");
  wait({token, [this] { transport_->cancel(); }}, timeout_s);
  {
    // Nothing but the transport is waited for, and it has been cancelled where the time was over.
    const py::gil_scoped_release no_gil;
    while (!workers_.wait_idle_for(kGiveUpAfter)) {
    }
  }
  if (!token.cancelled()) return;
  const py::object error = to_python(token.failure().error);
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
  throw py::error_already_set();
}

void Pipeline::cancel(const py::object& error) {
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
  const auto failure = std::make_exception_ptr(py::error_already_set());
  const py::gil_scoped_release no_gil;
  const std::lock_guard lock(running_mutex_);
  if (running_ == nullptr) return;
  running_->token.cancel(std::nullopt, failure);
  running_->wake();
}

void Pipeline::set_running(const Action* action) {
  if (!own_rank_) return;
  running_action_ = action == nullptr ? kNoAction
                                      : (static_cast<int64_t>(action->stage) << 40) |
                                            (static_cast<int64_t>(action->kind) << 32) | action->microbatch;
}

std::optional<Action> Pipeline::running_action() const {
  const int64_t packed = running_action_;
  if (packed == kNoAction) return std::nullopt;
  return Action{static_cast<int32_t>(packed >> 40), static_cast<Kind>((packed >> 32) & 0xff),
                static_cast<int32_t>(packed & 0xffffffff)};
}

void Pipeline::work(int32_t index) {
  thread_ids_.at(static_cast<size_t>(index)) = PyThread_get_thread_ident();
  const py::gil_scoped_release no_gil;
  workers_.work(index);
}

// Waits for user code of a cancelled step that had been given up on.
void Pipeline::settle() {
  if (!stuck_) return;
  wait_for_stuck(workers_, thread_ids_);
  stuck_.reset();
  abort();
}

StepReport Pipeline::run(StepRequest request) {
  settle();
  if (open_step_) abort();
  auto step = std::make_shared<Step>(*this, std::move(request));
  if (step->request.train) {
    for (const auto& stage : stages_) {
      if (stage) stage->begin_step();
    }
    open_step_ = true;
  }
  if (transport_) {
    transport_->start_receiving(
        step->inbound(), [step](int32_t, Arrival arrival) { step->arrive(std::move(arrival)); },
        [step](std::exception_ptr error) { step->fail(std::move(error)); });
  }
  const int32_t num_active = step->request.run_inline ? 1 : num_workers();
  const double timeout_s = step->request.timeout_s;
  const bool started = workers_.start([step](int32_t index) { step->work(index); }, num_active);
  if (!started) {
    abort();
    throw std::runtime_error(
        "the pipeline is closed or a step is running on another thread. Call step() from one thread.");
  }
  wait({step->cancel,
        [this, &step] {
          step->execution.wake_all();
          if (transport_) transport_->cancel();
        }},
       timeout_s);
  if (transport_) {
    const py::gil_scoped_release no_gil;
    transport_->finish_receiving();
  }
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

// Until the workers are idle, or were cancelled and user code does not come back.
void Pipeline::wait(const Running& running, double timeout_s) {
  const auto begin = Clock::now();
  std::optional<Clock::time_point> cancelled_at;
  bool interrupted = false;
  const auto set_running = [this](const Running* now) {
    const py::gil_scoped_release no_gil;
    const std::lock_guard lock(running_mutex_);
    running_ = now;
  };
  set_running(&running);
  for (;;) {
    {
      const py::gil_scoped_release no_gil;
      if (workers_.wait_idle_for(kSignalPoll)) break;
    }
    const auto now = Clock::now();
    if (PyErr_CheckSignals() != 0) {
      running.token.cancel(std::nullopt, std::make_exception_ptr(py::error_already_set()));
    }
    if (std::chrono::duration<double>(now - begin).count() > timeout_s && !running.token.cancelled()) {
      PyErr_Format(PyExc_TimeoutError,
                   "the step did not end within timeout_s=%d s. Raise timeout_s, or look for user code that hangs.",
                   static_cast<int>(timeout_s));
      running.token.cancel(std::nullopt, std::make_exception_ptr(py::error_already_set()));
    }
    if (!running.token.cancelled()) continue;
    if (!cancelled_at) {
      cancelled_at = now;
      running.wake();
    }
    if (!interrupted && now - *cancelled_at > kInterruptAfter) {
      interrupted = true;
      for (const auto& id : thread_ids_) PyThreadState_SetAsyncExc(id, PyExc_KeyboardInterrupt);
    }
    if (now - *cancelled_at > kGiveUpAfter) break;
  }
  set_running(nullptr);
  if (running.token.cancelled()) running.wake();
  bool idle = false;
  {
    const py::gil_scoped_release no_gil;
    idle = workers_.wait_idle_for(milliseconds(0));
  }
  if (interrupted && idle) take_back_interrupts(thread_ids_);
}

void Pipeline::commit(const std::vector<std::vector<double>>& factors) {
  if (!open_step_) return;
  const py::gil_scoped_release no_gil;
  for (size_t i = 0; i < stages_.size(); ++i) {
    if (stages_[i]) stages_[i]->commit_step(factors.at(i));
  }
  open_step_ = false;
}

void Pipeline::abort() {
  if (!open_step_) return;
  for (const auto& stage : stages_) {
    if (stage) stage->abort_step();
  }
  open_step_ = false;
}

void Pipeline::close() {
  take_back_interrupts(thread_ids_);
  const py::gil_scoped_release no_gil;
  workers_.close();
  // So that the connections close, and other ranks notice.
  if (workers_.wait_idle_for(milliseconds(0))) transport_ = nullptr;
}

}  // namespace timelyfreeze
