// Record layers as Python sees them; _native.pyi says what each method means.
#include <pybind11/pybind11.h>

#include <string_view>

#include "arrays.hpp"
#include "record_layer.hpp"

namespace elasticdl {
namespace {

using Layers = std::shared_ptr<RecordLayer>;

Layers new_layer(const std::string& out_key, const std::string& in_key, uint64_t records_per_key) {
  load_libcrypto(py::str(py::getattr(py::module_::import("_hashlib"), "__file__", py::str(""))));
  return std::make_shared<RecordLayer>(out_key, in_key, records_per_key);
}

template <std::string (RecordLayer::*kMethod)(const char*, size_t)>
py::bytes converted(RecordLayer& layer, const py::bytes& data) {
  const std::string_view bytes = data;
  std::string result;
  {
    const py::gil_scoped_release released;
    result = (layer.*kMethod)(bytes.data(), bytes.size());
  }
  return result;
}

}  // namespace

void bind_record_layers(py::module_& module) {
  py::register_exception<RecordError>(module, "RecordError", PyExc_ConnectionError);
  py::register_exception<CipherError>(module, "CipherError", PyExc_RuntimeError);
  py::class_<RecordLayer, Layers>(module, "RecordLayer")
      .def(py::init(&new_layer), py::arg("out_key"), py::arg("in_key"), py::arg("records_per_key") = 1 << 20)
      .def("seal", &converted<&RecordLayer::seal>, py::arg("data"))
      .def("open", &converted<&RecordLayer::open>, py::arg("data"))
      .def_property_readonly("is_amid_record", &RecordLayer::is_amid_record);
}

}  // namespace elasticdl
