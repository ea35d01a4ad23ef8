#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "core/program.h"
#include "ops/fused.h"
#include "runtime/allocator.h"
#include "runtime/async_pipeline.h"
#include "runtime/deferred_grad.h"
#include "runtime/packed_linear.h"
#include "runtime/pipeline.h"
#include "runtime/rng.h"
#include "runtime/stage.h"

namespace py = pybind11;
using namespace timelyfreeze;

namespace {

using PyAction = std::tuple<int32_t, std::string, int32_t>;

std::shared_ptr<Program> make_program(const std::vector<std::vector<PyAction>>& ranks,
                                      const std::vector<std::pair<ActionId, ActionId>>& edges) {
  std::vector<std::vector<Action>> actions;
  for (const auto& rank : ranks) {
    auto& row = actions.emplace_back();
    for (const auto& [stage, kind, microbatch] : rank)
      row.push_back({stage, static_cast<Kind>(kind.at(0)), microbatch});
  }
  return std::make_shared<Program>(actions, edges);
}

std::vector<Value> make_values(const std::vector<std::pair<std::vector<at::Tensor>, py::object>>& inputs) {
  std::vector<Value> values;
  for (const auto& [tensors, spec] : inputs) values.push_back({tensors, spec.is_none() ? nullptr : make_ref(spec)});
  return values;
}

void bind_request(py::module_& m) {
  py::class_<StepRequest>(m, "StepRequest")
      .def(py::init([](std::shared_ptr<Program> program,
                       const std::vector<std::pair<std::vector<at::Tensor>, py::object>>& inputs) {
             StepRequest request;
             request.program = std::move(program);
             request.inputs = make_values(inputs);
             request.loss_fn = py::none();
             return request;
           }),
           py::arg("program"), py::arg("inputs"))
      .def_readwrite("train", &StepRequest::train)
      .def_readwrite("run_inline", &StepRequest::run_inline)
      .def_readwrite("check_finite", &StepRequest::check_finite)
      .def_readwrite("return_outputs", &StepRequest::return_outputs)
      .def_readwrite("seed", &StepRequest::seed)
      .def_readwrite("step", &StepRequest::step)
      .def_readwrite("timeout_s", &StepRequest::timeout_s)
      .def_readwrite("targets", &StepRequest::targets)
      .def_readwrite("loss_fn", &StepRequest::loss_fn)
      .def_readwrite("weights", &StepRequest::weights)
      .def_readwrite("max_pending_bytes", &StepRequest::max_pending_bytes)
      .def_readwrite("grad_scale", &StepRequest::grad_scale)
      .def_readwrite("live", &StepRequest::live)
      .def_readwrite("needs_input_grad", &StepRequest::needs_input_grad);

  py::class_<StepReport>(m, "StepReport")
      .def_readonly("losses", &StepReport::losses)
      .def_property_readonly("counts",
                             [](const StepReport& self) {
                               py::list counts;
                               for (const auto& count : self.counts) counts.append(count ? count : py::none());
                               return counts;
                             })
      .def_property_readonly("outputs",
                             [](const StepReport& self) {
                               py::list outputs;
                               for (const auto& output : self.outputs) outputs.append(output ? output : py::none());
                               return outputs;
                             })
      .def_readonly("input_grads", &StepReport::input_grads)
      .def_readonly("origin_s", &StepReport::origin_s)
      .def_readonly("start_s", &StepReport::start_s)
      .def_readonly("end_s", &StepReport::end_s)
      .def_readonly("transits_s", &StepReport::transits_s)
      .def_readonly("skipped", &StepReport::skipped)
      .def_readonly("peak_pending_bytes", &StepReport::peak_pending_bytes)
      .def_readonly("failed", &StepReport::failed)
      .def_readonly("error", &StepReport::error);
}

using PyParcel = std::tuple<int32_t, std::vector<std::optional<at::Tensor>>, py::bytes>;

std::vector<PyParcel> transfer(Pipeline& pipeline, const std::vector<PyParcel>& parcels,
                               const std::vector<int32_t>& sources, double timeout_s) {
  std::vector<Parcel> sent;
  for (const auto& [peer, tensors, text] : parcels) sent.push_back({peer, tensors, text});
  std::vector<PyParcel> received;
  for (Parcel& parcel : pipeline.transfer(sent, sources, timeout_s)) {
    received.emplace_back(parcel.peer, std::move(parcel.tensors), py::bytes(parcel.text));
  }
  return received;
}

void bind_fused(py::module_& m) {
  m.def("norm", &ops::norm, py::arg("x"), py::arg("residual"), py::arg("weight"), py::arg("bias"), py::arg("eps"),
        py::arg("centered"), py::arg("passes_on"), py::call_guard<py::gil_scoped_release>());
  m.def("packed_linear", &packed_linear, py::arg("x"), py::arg("weights"), py::arg("biases"),
        py::arg("transposed") = false, py::call_guard<py::gil_scoped_release>());
  m.def("embedding", &fused_embedding, py::arg("indices"), py::arg("weight"), py::arg("padding_index"),
        py::call_guard<py::gil_scoped_release>());
  m.def("rope_qkv", &ops::rope_qkv, py::arg("qkv"), py::arg("cosines"), py::arg("sines"), py::arg("num_heads"),
        py::arg("num_kv_heads"), py::arg("offset"), py::call_guard<py::gil_scoped_release>());
}

void bind_pipeline(py::module_& m) {
  py::class_<Transport, std::shared_ptr<Transport>>(m, "Transport")
      .def(py::init([](const std::string& control, const std::string& up, const std::string& down,
                       const std::string& device) {
             return std::make_shared<Transport>(control, up, down, c10::Device(device));
           }),
           py::arg("control"), py::arg("up"), py::arg("down"), py::arg("device"))
      .def_property_readonly("clock_offset_s", &Transport::clock_offset_s)
      .def("cancel", &Transport::cancel, py::call_guard<py::gil_scoped_release>());

  // These release the interpreter lock themselves wherever they block.
  py::class_<Pipeline>(m, "Pipeline")
      .def(py::init([](std::vector<std::shared_ptr<Stage>> stages, const std::vector<int32_t>& stage_to_rank,
                       const std::vector<std::string>& devices, std::optional<int32_t> own_rank) {
             std::vector<c10::Device> parsed;
             for (const auto& device : devices) parsed.emplace_back(device);
             return std::make_unique<Pipeline>(std::move(stages), stage_to_rank, parsed, own_rank);
           }),
           py::arg("stages"), py::arg("stage_to_rank"), py::arg("devices"), py::arg("own_rank"))
      .def("connect", &Pipeline::connect, py::arg("transport"), py::arg("peers"))
      .def("set_clock", &Pipeline::set_clock, py::arg("timeout_s"))
      .def_property_readonly("running_action",
                             [](const Pipeline& self) -> std::optional<PyAction> {
                               const auto action = self.running_action();
                               if (!action) return std::nullopt;
                               const auto kind = std::string(1, static_cast<char>(action->kind));
                               return PyAction{action->stage, kind, action->microbatch};
                             })
      .def(
          "exchange",
          [](Pipeline& self, const std::string& own, double timeout_s) {
            std::vector<py::bytes> all;
            for (const std::string& text : self.exchange(own, timeout_s)) all.emplace_back(text);
            return all;
          },
          py::arg("own"), py::arg("timeout_s"))
      .def("transfer", &transfer, py::arg("parcels"), py::arg("sources"), py::arg("timeout_s"))
      .def("cancel", &Pipeline::cancel, py::arg("error"))
      .def("work", &Pipeline::work, py::arg("index"))
      .def("run", &Pipeline::run, py::arg("request"))
      .def("commit", &Pipeline::commit, py::arg("factors"))
      .def("abort", &Pipeline::abort)
      .def("close", &Pipeline::close);
}

using PyInput = std::tuple<std::vector<at::Tensor>, py::object, py::object, double>;

using PyMasks = std::optional<std::pair<std::vector<at::Tensor>, std::vector<at::Tensor>>>;

// A batch: (tensors, spec, target, weight) for each of its micro-batches; and its masks, see AsyncMasks.
void push_batch(AsyncPipeline& pipeline, const std::vector<PyInput>& microbatches, const PyMasks& masks) {
  std::shared_ptr<const AsyncMasks> shared;
  if (masks) shared = std::make_shared<const AsyncMasks>(AsyncMasks{masks->first, masks->second});
  std::vector<AsyncInput> batch;
  for (const auto& [tensors, spec, target, weight] : microbatches) {
    const auto place = static_cast<ActionId>(batch.size());
    batch.push_back(
        {{tensors, spec.is_none() ? nullptr : make_ref(spec)}, {make_ref(target), weight, false, place, shared}});
  }
  if (!batch.empty()) batch.back().ticket.ends_batch = true;
  pipeline.push(std::move(batch));
}

void bind_ledger(py::module_& m) {
  using Entry = AsyncLedger::StageEntry;
  py::class_<Entry>(m, "AsyncLedgerEntry")
      .def_readonly("num_updates", &Entry::num_updates)
      .def_readonly("num_skipped", &Entry::num_skipped)
      .def_readonly("bound", &Entry::bound)
      .def_readonly("microbatches", &Entry::microbatches)
      .def_readonly("last", &Entry::last);
}

using PyPlace = std::tuple<int32_t, std::string, int64_t>;

std::optional<PyPlace> as_tuple(const std::optional<AsyncPlace>& place) {
  if (!place) return std::nullopt;
  return PyPlace{place->stage, std::string(1, place->kind), place->microbatch};
}

void bind_norm_board(py::module_& m) {
  py::class_<NormBoard, std::shared_ptr<NormBoard>>(m, "NormBoard")
      .def(py::init<int64_t, int64_t>(), py::arg("num_stages"), py::arg("capacity"))
      .def("add", &NormBoard::add, py::arg("stage"), py::arg("square"))
      .def("count", &NormBoard::count, py::arg("stage"))
      .def("squares", &NormBoard::squares, py::arg("stage"))
      .def("set", &NormBoard::set, py::arg("stage"), py::arg("count"), py::arg("squares"))
      .def("at", &NormBoard::at, py::arg("stage"), py::arg("index"));
}

std::vector<std::pair<at::Tensor, py::object>> take_losses(AsyncPipeline& pipeline, int64_t count) {
  std::vector<std::pair<at::Tensor, py::object>> losses;
  for (const AsyncLoss& loss : pipeline.take_losses(count)) {
    losses.emplace_back(loss.tensor, loss.count ? py::object(py::float_(*loss.count)) : py::none());
  }
  return losses;
}

void bind_async(py::module_& m) {
  bind_ledger(m);
  bind_norm_board(m);
  py::class_<AsyncPipeline>(m, "AsyncPipeline")
      .def(py::init([](std::vector<std::shared_ptr<Stage>> stages, const std::vector<std::string>& devices,
                       py::object loss_fn, std::vector<py::object> updates, std::vector<py::object> batch_ends,
                       py::object loss_scale, int64_t accumulation, bool stash, bool recompute, bool predict,
                       uint64_t seed) {
             std::vector<c10::Device> parsed;
             for (const auto& device : devices) parsed.emplace_back(device);
             return std::make_unique<AsyncPipeline>(
                 std::move(stages), parsed,
                 AsyncCalls{std::move(loss_fn), std::move(updates), std::move(batch_ends), std::move(loss_scale)},
                 AsyncOptions{accumulation, stash, recompute, predict, seed});
           }),
           py::arg("stages"), py::arg("devices"), py::arg("loss_fn"), py::arg("updates"), py::arg("batch_ends"),
           py::arg("loss_scale"), py::arg("accumulation"), py::arg("stash"), py::arg("recompute"), py::arg("predict"),
           py::arg("seed"))
      .def("work", &AsyncPipeline::work, py::arg("index"))
      .def("push", &push_batch, py::arg("microbatches"), py::arg("masks") = py::none())
      .def("wait_for_losses", &AsyncPipeline::wait_for_losses, py::arg("count"), py::arg("timeout_s"))
      .def("settle", &AsyncPipeline::settle, py::arg("timeout_s"))
      .def("drain", &AsyncPipeline::drain, py::arg("timeout_s"))
      .def("take_losses", &take_losses, py::arg("count"))
      .def("take_times",
           [](AsyncPipeline& self) {
             std::vector<std::tuple<int32_t, std::string, int64_t, double, double>> times;
             for (const AsyncTime& time : self.take_times()) {
               times.emplace_back(time.stage, std::string(1, time.kind), time.microbatch, time.start_s, time.end_s);
             }
             return times;
           })
      .def("skip_losses", &AsyncPipeline::skip_losses, py::arg("count"))
      .def("take_failure",
           [](AsyncPipeline& self) {
             const auto report = self.take_failure();
             return std::pair(as_tuple(report.place), report.error);
           })
      .def_property_readonly("failure",
                             [](AsyncPipeline& self) {
                               const auto report = self.failure();
                               return report ? std::optional(std::pair(as_tuple(report->place), report->error))
                                             : std::nullopt;
                             })
      .def(
          "connect",
          [](AsyncPipeline& self, std::shared_ptr<Transport> transport, std::optional<int32_t> below,
             std::optional<int32_t> above, std::shared_ptr<NormBoard> norms, py::object on_failure) {
            self.connect(std::move(transport), {below, above}, std::move(norms), std::move(on_failure));
          },
          py::arg("transport"), py::arg("below"), py::arg("above"), py::arg("norms"), py::arg("on_failure"))
      .def("fail", &AsyncPipeline::fail, py::arg("error"))
      .def_property_readonly("running_action", [](const AsyncPipeline& self) { return as_tuple(self.running()); })
      .def("forget", &AsyncPipeline::forget)
      .def("abandon", &AsyncPipeline::abandon)
      .def("close", &AsyncPipeline::close)
      .def_property_readonly("is_open", &AsyncPipeline::is_open)
      .def_property_readonly("num_weight_copies",
                             [](const AsyncPipeline& self) { return self.ledger().num_weight_copies(); })
      .def_property_readonly("ledger", [](const AsyncPipeline& self) { return self.ledger().entries(); })
      .def_readwrite("num_microbatches", &AsyncPipeline::num_microbatches)
      .def_readwrite("timed", &AsyncPipeline::timed);
}

}  // namespace

PYBIND11_MODULE(_C, m) {
  m.doc() = "The runtime of timelyfreeze: programs, stages, workers.";
  register_random_operators();
  register_deferred_operators();

  py::class_<Program, std::shared_ptr<Program>>(m, "Program")
      .def(py::init(&make_program), py::arg("ranks"), py::arg("edges"))
      .def_property_readonly("num_actions", &Program::num_actions);

  py::class_<Stage, std::shared_ptr<Stage>>(m, "Stage")
      .def(py::init<py::object, py::object, std::vector<at::Tensor>>(), py::arg("forward"), py::arg("encode"),
           py::arg("parameters"));

  bind_request(m);
  bind_fused(m);

  bind_pipeline(m);
  bind_async(m);
  m.def("keep_large_blocks", &keep_large_blocks);
  m.def("action_rng_state", []() -> std::optional<at::Tensor> {
    const at::Generator generator = action_generator();
    if (!generator.defined()) return std::nullopt;
    return generator.get_state();
  });
  m.def("set_action_rng_state", [](const at::Tensor& state) {
    at::Generator generator = action_generator();
    if (!generator.defined()) return false;
    generator.set_state(state);
    return true;
  });
}
