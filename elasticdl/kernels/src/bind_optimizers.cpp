// `_native.Optimizer`: an update rule on NumPy arrays.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <stdexcept>
#include <string>

#include "optimizers.hpp"

namespace py = pybind11;

namespace elasticdl {
namespace {

void check(const py::array& array, const py::array& like, const std::string& name) {
  if (!py::isinstance<py::array_t<float>>(array) || !(array.flags() & py::array::c_style)) {
    throw std::invalid_argument(name + " must be C-contiguous float32");
  }
  bool same = array.ndim() == like.ndim();
  for (py::ssize_t axis = 0; same && axis < like.ndim(); ++axis) same = array.shape(axis) == like.shape(axis);
  if (!same) throw std::invalid_argument(name + " has another shape than weights");
}

void apply(const Rule& rule, py::array weights, const std::vector<py::array>& slots, const py::array& gradient,
           const std::vector<float>& scalars, float clip) {
  check(weights, weights, "weights");
  check(gradient, weights, "gradient");
  if (slots.size() != rule.num_slots() || scalars.size() != rule.num_scalars()) {
    throw std::invalid_argument("this optimizer needs " + std::to_string(rule.num_slots()) + " slots and " +
                                std::to_string(rule.num_scalars()) + " scalars, not " + std::to_string(slots.size()) +
                                " and " + std::to_string(scalars.size()));
  }
  for (const py::array& slot : slots) check(slot, weights, "a slot");
  if (!weights.writeable()) throw std::invalid_argument("weights must be writeable");
  std::vector<float*> slot_data;
  for (py::array slot : slots) {
    if (!slot.writeable()) throw std::invalid_argument("slots must be writeable");
    slot_data.push_back(static_cast<float*>(slot.mutable_data()));
  }
  float* weight_data = static_cast<float*>(weights.mutable_data());
  const float* gradient_data = static_cast<const float*>(gradient.data());
  const size_t n = static_cast<size_t>(weights.size());
  py::gil_scoped_release released;
  rule.apply(weight_data, slot_data.data(), gradient_data, n, scalars.data(), clip);
}

}  // namespace

void bind_optimizers(py::module_& module) {
  py::class_<Rule>(module, "Optimizer")
      .def(py::init(&make_rule), py::arg("kind"), py::arg("options"))
      .def_property_readonly("num_slots", &Rule::num_slots)
      .def("apply", &apply, py::arg("weights"), py::arg("slots"), py::arg("gradient"), py::arg("scalars"),
           py::arg("clip") = 0.0f);
}

}  // namespace elasticdl
