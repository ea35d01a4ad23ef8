#pragma once
#include <ATen/ThreadLocalState.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/cancel.h"
#include "runtime/async_ledger.h"
#include "runtime/async_link.h"
#include "runtime/async_times.h"
#include "runtime/device.h"
#include "runtime/norm_board.h"
#include "runtime/python_ref.h"
#include "runtime/stage.h"
#include "runtime/weight_prediction.h"

namespace timelyfreeze {

struct AsyncOptions {
  int64_t accumulation = 1;  // backwards of a stage between two of its updates
  bool stash = false;        // a backward gets the weights that its forward had (PipeDream)
  bool recompute = false;    // keep the stages' inputs only, and run forward again before backward
  bool predict = false;      // a forward sees the weights that its backward is expected to find
  uint64_t seed = 0;
};

// The user's code beside the stages. Called on the stages' workers, with the interpreter lock.
struct AsyncCalls {
  pybind11::object loss_fn;               // None: the last stage takes the target and returns the loss
  std::vector<pybind11::object> updates;  // a stage: (factor for the gradients) -> whether the weights changed; or None
  std::vector<pybind11::object> batch_ends;  // a stage: () after the last backward of a batch; or None
  pybind11::object loss_scale;               // () -> what the losses of the next update are multiplied by; or None
};

// What is frozen for the micro-batches of a batch; bytes, a tensor a stage.
struct AsyncMasks {
  std::vector<at::Tensor> live;              // [micro-batches, parameters]
  std::vector<at::Tensor> needs_input_grad;  // [micro-batches]: even if nothing below is live
};

// What goes through the stages with a micro-batch.
struct AsyncTicket {
  PyRef target;
  double weight = 1.0;  // of its mean loss: its samples
  bool ends_batch = false;
  ActionId place = 0;  // in its batch
  std::shared_ptr<const AsyncMasks> masks = nullptr;

  [[nodiscard]] const uint8_t* live_row(int32_t stage) const;
  [[nodiscard]] bool forces_input_grad(int32_t stage) const;
};

struct AsyncInput {
  Value value;
  AsyncTicket ticket;
};

struct AsyncLoss {
  at::Tensor tensor;            // mean or sum, detached
  std::optional<double> count;  // of a (sum, count) loss
};

// Where a stream failed: `kind` is F, B or U (an update). Without a stage it was stopped from outside.
struct AsyncPlace {
  int32_t stage;
  char kind;
  int64_t microbatch;
};

// One run of the stages over micro-batches that keep coming, until `end`.
//
// Stage s of N does N-s forwards, then a backward and a forward in turn; after every `accumulation` backwards it
// updates its own weights. That order is fixed, nothing in it waits for another stage's update, and no stage has more
// than N-s micro-batches between forward and backward. At the end the backwards that are left run, and an update of
// what has been accumulated.
//
// Either all stages are here, or one, which a link connects with those of other processes; the others are null. Then
// every process is given all micro-batches, of which the first stage takes the input and the last one the target, and
// the losses come down with the gradients.
class AsyncStream {
 public:
  AsyncStream(const std::vector<std::shared_ptr<Stage>>& stages, const std::vector<RankDevice>& devices,
              const AsyncCalls& calls, const AsyncOptions& options, AsyncLedger& ledger, int64_t first_microbatch,
              bool timed, NormBoard* norms, std::unique_ptr<AsyncLink> link);

  // How many notes its packets have.
  static size_t num_notes(const NormBoard& norms);

  // Called once, from a worker or a receiving thread, where it fails by itself; from before the first push on.
  std::function<void()> on_failure;

  // The whole run of a stage. Never throws; what goes wrong cancels the stream.
  void work(int32_t stage);
  void push(std::vector<AsyncInput> inputs);
  void end();
  void fail(std::exception_ptr error);
  // Waits until nothing is received any more, after `end` or a failure.
  void stop_receiving();
  // What the one stage that is here is doing: none while it waits.
  [[nodiscard]] std::optional<AsyncPlace> running() const;

  [[nodiscard]] bool failed() const { return cancel_.cancelled(); }
  [[nodiscard]] std::pair<std::optional<AsyncPlace>, std::exception_ptr> failure() const;
  std::vector<AsyncLoss> take_losses(int64_t count);
  std::vector<AsyncTime> take_times() { return times_.take(); }
  // Lets go of so many losses, now or as they come.
  void skip_losses(int64_t count);
  // What can be waited for: so many losses; that every stage waits for input, so that no weight changes until there is
  // some; that the stages have left.
  enum class Goal { losses, settled, over };
  // Returns whether it was reached within `timeout`; true at once where the stream fails, unless all shall leave.
  bool wait(Goal goal, int64_t num_losses, std::chrono::milliseconds timeout);

 private:
  struct Message {
    std::vector<Shipment> tensors;
    std::vector<bool> requires_grad;
    PyRef spec;
    AsyncTicket ticket;
    std::vector<double> norms;  // from another process, as the two below: what its NormBoard wrote
  };
  struct Gradients {
    std::vector<Shipment> tensors;
    double weight = 1.0;
    double scale = 1.0;  // of the loss that they are of
    AsyncLoss loss;
    std::vector<double> norms;
  };
  // A micro-batch between its forward and its backward.
  struct Slot {
    Held held;
    AsyncTicket ticket;
    Message kept;                   // of a micro-batch that is recomputed: what forward got
    std::vector<int64_t> versions;  // of its tensors
    int64_t updates_at_forward = 0;
    bool recorded = false;
    bool recomputes = false;
    AsyncLoss loss;
  };
  // The gradients that the next update is of. They are divided by the first micro-batch's weight times how many there
  // shall be as they come, and what that differs from their weights' sum by is the update's factor: 1 where all weigh
  // the same. It takes the loss scale out as well.
  struct Window {
    double nominal = 0.0;
    double sum = 0.0;
    double scale = 1.0;
    int64_t size = 0;

    void add(double weight, int64_t accumulation);
    [[nodiscard]] double factor() const { return (sum > 0.0 ? nominal / sum : 1.0) / scale; }
  };
  struct alignas(64) StageRun {
    std::atomic<uint32_t> rings{0};
    std::atomic<int64_t> num_forwards{0};   // messages that have come
    std::atomic<int64_t> num_gradients{0};  // the same from above
    std::atomic<int64_t> settled_at{-1};    // waits for the forward of this one
    std::vector<Message> inbox;
    std::vector<Gradients> gradients;
    std::vector<Slot> slots;
    Window window;
    std::map<int64_t, std::vector<at::Tensor>> stashes;  // by how many updates had been made
    WeightPrediction prediction;
  };
  enum class Coming { here, never, cancelled };

  [[nodiscard]] int32_t num_stages() const { return static_cast<int32_t>(stages_.size()); }
  [[nodiscard]] int64_t most_outstanding(int32_t stage) const { return num_stages() - stage; }
  [[nodiscard]] bool is_last(int32_t stage) const { return stage + 1 == num_stages(); }
  [[nodiscard]] bool is_local(int32_t stage) const { return stages_[static_cast<size_t>(stage)] != nullptr; }
  Slot& slot(int32_t stage, int64_t m);
  bool trains(int32_t stage, const uint8_t* live) const;
  [[nodiscard]] int64_t num_updates_ahead(int32_t stage, int64_t m) const;

  // Doorbells: see Execution.
  void ring(int32_t stage);
  Coming wait_for_input(int32_t stage, int64_t m);
  bool wait_for_gradients(int32_t stage, int64_t m);
  void tell();
  [[nodiscard]] bool has_reached(Goal goal, int64_t num_losses) const;

  // With other processes: see async_remote.cpp.
  [[nodiscard]] int32_t own_stage() const;
  void start_receiving();
  void arrive_forward(Arrival arrival);
  void arrive_grads(Arrival arrival);
  void fail_receiving(std::exception_ptr error);
  void send_forward_away(Value value, const std::string& spec, std::vector<bool> flags, const AsyncTicket& ticket);
  void send_grads_away(const Slot& own, double weight);
  void add_loss(AsyncLoss loss);
  void begin(AsyncPlace& now, char kind, int64_t m);

  void run_order(int32_t stage, AsyncPlace& now);
  void forward(int32_t stage, int64_t m);
  Message take_message(int32_t stage, int64_t m);
  Value receive(int32_t stage, const Message& message, bool record, Held& held) const;
  void keep_for_recompute(Slot& own, int32_t stage, const Message& message) const;
  void recompute(int32_t stage, int64_t m, Slot& own);
  void send_on(int32_t stage, int64_t m, Value value, const std::string& spec, Slot& own);
  void take_loss(const pybind11::object& loss, Slot& own);
  void backward(int32_t stage, int64_t m, bool has_younger);
  void differentiate(int32_t stage, Slot& own, const std::vector<Shipment>& arrived);
  void send_grads(int32_t stage, int64_t m, const Slot& own, double weight, double scale);
  void update(int32_t stage, int64_t m, int64_t num_outstanding);
  void stash_weights(int32_t stage);
  [[nodiscard]] uint64_t seed_of(int32_t stage, char kind, int64_t m) const;

  const std::vector<std::shared_ptr<Stage>>& stages_;
  const std::vector<RankDevice>& devices_;
  const AsyncCalls& calls_;
  const AsyncOptions options_;
  AsyncLedger& ledger_;
  NormBoard* const norms_;  // or null, as the link
  const int64_t first_microbatch_;
  const at::ThreadLocalState caller_;
  CancelToken cancel_;
  std::optional<AsyncPlace> failed_at_;
  std::vector<StageRun> runs_;
  AsyncTimes times_;
  std::atomic<int64_t> end_{-1};  // how many micro-batches there are; -1: more may come
  mutable std::mutex mutex_;      // for what follows
  std::condition_variable news_;
  std::deque<AsyncInput> inputs_;
  int64_t num_pushed_ = 0;
  std::deque<AsyncLoss> losses_;
  int64_t num_skipped_losses_ = 0;  // that are still to come
  int32_t num_over_ = 0;
  std::atomic<int64_t> running_{0};
  const std::unique_ptr<AsyncLink> link_;  // or null; the last, so that its threads end first
};

}  // namespace timelyfreeze
