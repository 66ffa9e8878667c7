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

// From this number of bytes on, other threads of Python run while they are copied.
constexpr int64_t kCopiedAlone = 1 << 16;

struct Span {
  const char* data;
  py::ssize_t size;
};

// New objects of bytes with these contents.
py::list copies_of(const std::vector<Span>& spans) {
  py::list result(spans.size());
  std::vector<char*> targets;
  targets.reserve(spans.size());
  int64_t total = 0;
  for (size_t i = 0; i < spans.size(); ++i) {
    PyObject* copy = PyBytes_FromStringAndSize(nullptr, spans[i].size);
    if (copy == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(result.ptr(), i, copy);
    targets.push_back(PyBytes_AS_STRING(copy));
    total += spans[i].size;
  }
  const auto copy_all = [&] {
    for (size_t i = 0; i < spans.size(); ++i) std::memcpy(targets[i], spans[i].data, spans[i].size);
  };
  if (total < kCopiedAlone) {
    copy_all();
  } else {
    const py::gil_scoped_release released;
    copy_all();
  }
  return result;
}

// The records without their lengths; `ends` are counted from `begin`, where the first one begins.
py::list split_records(const py::bytes& piece, const py::object& ends_object, int64_t begin) {
  const Input<int64_t> ends(ends_object, "ends", 1);
  char* data = nullptr;
  py::ssize_t size = 0;
  if (PyBytes_AsStringAndSize(piece.ptr(), &data, &size) != 0) throw py::error_already_set();
  std::vector<Span> spans;
  spans.reserve(ends.size());
  int64_t start = 0;
  for (int64_t i = 0; i < ends.size(); ++i) {
    const int64_t end = ends.data()[i] - begin;
    check(start + kLengthBytes <= end && end <= size, "a record is not in the piece");
    spans.push_back({data + start + kLengthBytes, end - start - kLengthBytes});
    start = end;
  }
  return copies_of(spans);
}

// Of each record the bytes [begin, end), which `head` stands before; None if another head does.
py::object cut_records(const py::list& records, const py::bytes& head, int64_t begin, int64_t end) {
  char* expected = nullptr;
  py::ssize_t head_size = 0;
  if (PyBytes_AsStringAndSize(head.ptr(), &expected, &head_size) != 0) throw py::error_already_set();
  check(head_size <= begin && begin <= end, "the places are not in a record");
  std::vector<Span> spans;
  spans.reserve(records.size());
  for (const py::handle record : records) {
    char* data = nullptr;
    py::ssize_t size = 0;
    if (PyBytes_AsStringAndSize(record.ptr(), &data, &size) != 0) throw py::error_already_set();
    check(end <= size, "the places are not in a record");
    if (std::memcmp(data + begin - head_size, expected, head_size) != 0) return py::none();
    spans.push_back({data + begin, end - begin});
  }
  return copies_of(spans);
}

}  // namespace

void bind_records(py::module_& module) {
  module.def("record_ends", &record_ends, py::arg("body"), py::arg("num_records"));
  module.def("cut_records", &cut_records, py::arg("records"), py::arg("head"), py::arg("begin"), py::arg("end"));
  module.def("split_records", &split_records, py::arg("piece"), py::arg("ends"), py::arg("begin"));
}

}  // namespace elasticdl
