// Meshes as Python sees them; _native.pyi says what each method means.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>

#include "arrays.hpp"
#include "mesh.hpp"

namespace elasticdl {
namespace {

constexpr double kLongestWaitS = 1e6;

char* memory_at(uint64_t address) { return reinterpret_cast<char*>(address); }

// A collective on its way, and the Python objects whose memory it uses.
class MeshWork {
 public:
  MeshWork(std::shared_ptr<Mesh> mesh, Mesh::Ticket call, py::object memory)
      : mesh_(std::move(mesh)), call_(std::move(call)), memory_(std::move(memory)) {}

  bool wait(double timeout_s) {
    const std::chrono::duration<double> timeout(std::clamp(timeout_s, 0.0, kLongestWaitS));
    const auto end = std::chrono::steady_clock::now() + std::chrono::duration_cast<Mesh::Time::duration>(timeout);
    const py::gil_scoped_release released;
    return mesh_->wait(call_, end);
  }

 private:
  std::shared_ptr<Mesh> mesh_;
  Mesh::Ticket call_;
  py::object memory_;
};

using Meshes = std::shared_ptr<Mesh>;

MeshWork all_reduce(const Meshes& mesh, uint64_t address, uint64_t count, const std::string& type, py::object memory) {
  return {mesh, mesh->all_reduce(memory_at(address), count, type), std::move(memory)};
}

MeshWork all_gather(const Meshes& mesh, uint64_t address, uint64_t size, const std::vector<uint64_t>& into,
                    py::object memory) {
  std::vector<char*> places(into.size());
  std::transform(into.begin(), into.end(), places.begin(), memory_at);
  return {mesh, mesh->all_gather(memory_at(address), size, places), std::move(memory)};
}

MeshWork broadcast(const Meshes& mesh, uint64_t address, uint64_t size, int source, py::object memory) {
  return {mesh, mesh->broadcast(memory_at(address), size, source), std::move(memory)};
}

}  // namespace

void bind_meshes(py::module_& module) {
  py::register_exception<MeshFailure>(module, "MeshFailure", PyExc_RuntimeError);
  py::class_<MeshWork>(module, "MeshWork").def("wait", &MeshWork::wait, py::arg("timeout_s"));
  py::class_<Mesh, Meshes>(module, "Mesh")
      .def(py::init<int, std::vector<int>, std::vector<std::shared_ptr<RecordLayer>>>(), py::arg("rank"),
           py::arg("sockets"), py::arg("records") = std::vector<std::shared_ptr<RecordLayer>>())
      .def("all_reduce", &all_reduce, py::arg("address"), py::arg("count"), py::arg("type"), py::arg("memory"))
      .def("all_gather", &all_gather, py::arg("address"), py::arg("size"), py::arg("into"), py::arg("memory"))
      .def("broadcast", &broadcast, py::arg("address"), py::arg("size"), py::arg("source"), py::arg("memory"))
      .def("gone", &Mesh::gone, py::call_guard<py::gil_scoped_release>())
      .def("interrupt", &Mesh::interrupt, py::call_guard<py::gil_scoped_release>())
      .def("close", &Mesh::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace elasticdl
