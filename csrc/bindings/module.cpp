#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "core/program.h"
#include "ops/fused.h"
#include "runtime/allocator.h"
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
      .def_readonly("start_s", &StepReport::start_s)
      .def_readonly("end_s", &StepReport::end_s)
      .def_readonly("skipped", &StepReport::skipped)
      .def_readonly("peak_pending_bytes", &StepReport::peak_pending_bytes)
      .def_readonly("failed", &StepReport::failed)
      .def_readonly("error", &StepReport::error);
}

void bind_fused(py::module_& m) {
  m.def("norm", &ops::norm, py::arg("x"), py::arg("residual"), py::arg("weight"), py::arg("bias"), py::arg("eps"),
        py::arg("centered"), py::arg("passes_on"), py::call_guard<py::gil_scoped_release>());
  m.def("packed_linear", &packed_linear, py::arg("x"), py::arg("weights"), py::arg("biases"),
        py::call_guard<py::gil_scoped_release>());
  m.def("embedding", &fused_embedding, py::arg("indices"), py::arg("weight"), py::arg("padding_index"),
        py::call_guard<py::gil_scoped_release>());
  m.def("rope_qkv", &ops::rope_qkv, py::arg("qkv"), py::arg("cosines"), py::arg("sines"), py::arg("num_heads"),
        py::arg("num_kv_heads"), py::arg("offset"), py::call_guard<py::gil_scoped_release>());
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

  // These release the interpreter lock themselves wherever they block.
  py::class_<Pipeline>(m, "Pipeline")
      .def(py::init([](std::vector<std::shared_ptr<Stage>> stages, const std::vector<int32_t>& stage_to_rank,
                       const std::vector<std::string>& devices) {
             std::vector<c10::Device> parsed;
             for (const auto& device : devices) parsed.emplace_back(device);
             return std::make_unique<Pipeline>(std::move(stages), stage_to_rank, parsed);
           }),
           py::arg("stages"), py::arg("stage_to_rank"), py::arg("devices"))
      .def("work", &Pipeline::work, py::arg("rank"))
      .def("run", &Pipeline::run, py::arg("request"))
      .def("commit", &Pipeline::commit, py::arg("factors"))
      .def("abort", &Pipeline::abort)
      .def("close", &Pipeline::close);

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
