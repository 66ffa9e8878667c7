// The records of an uncompressed RecordIO chunk: each is a u32 of its length and its bytes.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "arrays.hpp"

namespace elasticdl {
namespace {

constexpr int64_t kLengthBytes = sizeof(uint32_t);

// Where the records end, up to the first whose length lies beyond the body.
py::object record_ends(const py::bytes& body, int64_t num_records) {
  char* data = nullptr;
  py::ssize_t size = 0;
  if (PyBytes_AsStringAndSize(body.ptr(), &data, &size) != 0) throw py::error_already_set();
  std::vector<int64_t> ends;
  {
    const py::gil_scoped_release released;
    ends.reserve(std::min<int64_t>(num_records, size / kLengthBytes));
    for (int64_t at = 0; static_cast<int64_t>(ends.size()) < num_records && at + kLengthBytes <= size;) {
      uint32_t length;
      std::memcpy(&length, data + at, kLengthBytes);
      at += kLengthBytes + length;
      ends.push_back(at);
    }
  }
  auto result = new_array<int64_t>({static_cast<py::ssize_t>(ends.size())});
  std::copy(ends.begin(), ends.end(), result.mutable_data());
  return result;
}

// The records without their lengths; `ends` are counted from `begin`, where the first one begins.
py::list split_records(const py::bytes& piece, const py::object& ends_object, int64_t begin) {
  const Input<int64_t> ends(ends_object, "ends", 1);
  char* data = nullptr;
  py::ssize_t size = 0;
  if (PyBytes_AsStringAndSize(piece.ptr(), &data, &size) != 0) throw py::error_already_set();
  py::list records(ends.size());
  int64_t start = 0;
  for (int64_t i = 0; i < ends.size(); ++i) {
    const int64_t end = ends.data()[i] - begin;
    check(start + kLengthBytes <= end && end <= size, "a record is not in the piece");
    PyObject* record = PyBytes_FromStringAndSize(data + start + kLengthBytes, end - start - kLengthBytes);
    if (record == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(records.ptr(), i, record);
    start = end;
  }
  return records;
}

}  // namespace

void bind_records(py::module_& module) {
  module.def("record_ends", &record_ends, py::arg("body"), py::arg("num_records"));
  module.def("split_records", &split_records, py::arg("piece"), py::arg("ends"), py::arg("begin"));
}

}  // namespace elasticdl
