#include "runtime/async_pipeline.h"

#include <chrono>
#include <stdexcept>

#include "runtime/errors.h"
#include "runtime/interrupts.h"

namespace py = pybind11;

namespace timelyfreeze {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

std::vector<int32_t> local_stages(const std::vector<std::shared_ptr<Stage>>& stages) {
  std::vector<int32_t> found;
  for (size_t s = 0; s < stages.size(); ++s) {
    if (stages[s]) found.push_back(static_cast<int32_t>(s));
  }
  return found;
}

}  // namespace

AsyncPipeline::AsyncPipeline(std::vector<std::shared_ptr<Stage>> stages, const std::vector<c10::Device>& devices,
                             AsyncCalls calls, AsyncOptions options)
    : stages_(std::move(stages)),
      local_(local_stages(stages_)),
      calls_(std::move(calls)),
      options_(options),
      ledger_(static_cast<int64_t>(stages_.size()), options.accumulation),
      thread_ids_(local_.size()),
      workers_(static_cast<int32_t>(local_.size())) {
  if (local_.empty() || (local_.size() > 1 && local_.size() < stages_.size()) || devices.size() != stages_.size() ||
      calls_.updates.size() != stages_.size() || calls_.batch_ends.size() != stages_.size() ||
      options_.accumulation < 1) {
    throw std::invalid_argument("expected a device, an update and a batch end for each stage, and accumulation >= 1");
  }
  for (const c10::Device& device : devices) devices_.emplace_back(device);
}

void AsyncPipeline::connect(std::shared_ptr<Transport> transport, AsyncLink::Peers peers,
                            std::shared_ptr<NormBoard> norms, py::object on_failure) {
  transport->carry_notes(AsyncStream::num_notes(*norms));
  norms_ = std::move(norms);
  transport_ = std::move(transport);
  peers_ = peers;
  on_failure_ = make_ref(std::move(on_failure));
}

void AsyncPipeline::fail(const py::object& error) {
  const auto stream = stream_;
  if (!stream) return;
  PyErr_SetObject(py::type::of(error).ptr(), error.ptr());
  const auto failure = std::make_exception_ptr(py::error_already_set());
  const py::gil_scoped_release no_gil;
  stream->fail(failure);
}

std::optional<AsyncPlace> AsyncPipeline::running() const { return stream_ ? stream_->running() : std::nullopt; }

// An exception gives itself away once only, so what it was is kept.
std::optional<AsyncPipeline::Report> AsyncPipeline::failure() {
  if (!stream_ || !stream_->failed()) return std::nullopt;
  if (!told_) {
    const auto [place, error] = stream_->failure();
    told_ = Report{place, to_python(error)};
  }
  return told_;
}

void AsyncPipeline::work(int32_t index) {
  thread_ids_.at(static_cast<size_t>(index)) = PyThread_get_thread_ident();
  const py::gil_scoped_release no_gil;
  workers_.work(index);
}

void AsyncPipeline::push(std::vector<AsyncInput> batch) {
  settle_stuck();
  for (const RankDevice& device : devices_) device.follow_caller();
  const auto size = static_cast<int64_t>(batch.size());
  if (!stream_) begin();
  num_microbatches += size;
  const py::gil_scoped_release no_gil;
  stream_->push(std::move(batch));
}

void AsyncPipeline::begin() {
  std::unique_ptr<AsyncLink> link;
  if (transport_) link = std::make_unique<AsyncLink>(transport_, peers_, specs_);
  for (const int32_t stage : local_) stages_[static_cast<size_t>(stage)]->note_trainable();
  stream_ = std::make_shared<AsyncStream>(stages_, devices_, calls_, options_, ledger_, num_microbatches, timed,
                                          norms_.get(), std::move(link));
  if (transport_) {
    stream_->on_failure = [call = on_failure_] {
      const py::gil_scoped_acquire gil;
      try {
        (*call)();
      } catch (py::error_already_set& error) {  // an interrupt: the caller reports it as well
        error.discard_as_unraisable("timelyfreeze: a stage's failure");
      }
    };
  }
  const auto job = [stream = stream_, local = local_](int32_t index) {
    stream->work(local[static_cast<size_t>(index)]);
  };
  if (workers_.start(job, static_cast<int32_t>(local_.size()))) return;
  abandon();
  throw std::runtime_error("the pipeline is closed or busy. Call run() from one thread.");
}

bool AsyncPipeline::wait_for_losses(int64_t count, double timeout_s) {
  return wait(AsyncStream::Goal::losses, count, timeout_s);
}

bool AsyncPipeline::settle(double timeout_s) {
  if (!wait(AsyncStream::Goal::settled, 0, timeout_s)) return false;
  for (const RankDevice& device : devices_) device.lead_caller();
  return true;
}

bool AsyncPipeline::drain(double timeout_s) {
  if (stream_) stream_->end();
  if (!wait(AsyncStream::Goal::over, 0, timeout_s)) return false;
  for (const RankDevice& device : devices_) device.lead_caller();
  const py::gil_scoped_release no_gil;
  if (stream_) stream_->stop_receiving();
  workers_.wait_idle_for(kGiveUpAfter);
  return true;
}

// Until it is reached. Where the stream fails, or the caller is interrupted, it is taken down.
bool AsyncPipeline::wait(AsyncStream::Goal goal, int64_t count, double timeout_s) {
  if (!stream_) return !failure_;
  const auto begin = Clock::now();
  for (bool reached = false; !reached;) {
    {
      const py::gil_scoped_release no_gil;
      reached = stream_->wait(goal, count, kSignalPoll);
    }
    if (PyErr_CheckSignals() != 0) stream_->fail(std::make_exception_ptr(py::error_already_set()));
    if (!reached && std::chrono::duration<double>(Clock::now() - begin).count() > timeout_s && !stream_->failed()) {
      PyErr_Format(PyExc_TimeoutError,
                   "the pipeline did not get on within timeout_s=%d s. Raise timeout_s, or look for user code that "
                   "hangs.",
                   static_cast<int>(timeout_s));
      stream_->fail(std::make_exception_ptr(py::error_already_set()));
    }
    if (stream_->failed()) {
      take_down();
      return false;
    }
  }
  return true;
}

// After a failure: waits for the stages, interrupts user code that does not come back, and keeps what to say.
void AsyncPipeline::take_down() {
  {
    const py::gil_scoped_release no_gil;
    stream_->stop_receiving();
  }
  const bool idle = wait_or_interrupt(workers_, thread_ids_);
  failure_ = failure();
  told_.reset();
  if (!idle) stuck_ = stream_;
  stream_.reset();
}

void AsyncPipeline::settle_stuck() {
  if (!stuck_) return;
  wait_for_stuck(workers_, thread_ids_);
  stuck_.reset();
}

std::vector<AsyncLoss> AsyncPipeline::take_losses(int64_t count) {
  if (!stream_) return {};
  devices_.back().lead_caller();
  return stream_->take_losses(count);
}

std::vector<AsyncTime> AsyncPipeline::take_times() {
  if (!stream_) return {};
  const py::gil_scoped_release no_gil;
  return stream_->take_times();
}

AsyncPipeline::Report AsyncPipeline::take_failure() {
  Report report = failure_.value_or(Report{std::nullopt, py::none()});
  failure_.reset();
  return report;
}

void AsyncPipeline::forget() { stream_.reset(); }

void AsyncPipeline::abandon() {
  if (!stream_) return;
  PyErr_SetString(PyExc_RuntimeError, "given up.");
  stream_->fail(std::make_exception_ptr(py::error_already_set()));
  take_down();
  failure_.reset();
}

void AsyncPipeline::close() {
  abandon();
  take_back_interrupts(thread_ids_);
  const py::gil_scoped_release no_gil;
  workers_.close();
}

}  // namespace timelyfreeze
