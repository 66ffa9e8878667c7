// The records of an uncompressed RecordIO chunk: each is a u32 of its length and its bytes.
#include <pybind11/pybind11.h>
#include <sys/uio.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "arrays.hpp"

namespace elasticdl {
namespace {

constexpr int64_t kLengthBytes = sizeof(uint32_t);

// Where the records end, up to the first whose length lies beyond the body.
py::object record_ends(const py::buffer& body, int64_t num_records) {
  const py::buffer_info held = body.request();
  const char* data = static_cast<const char*>(held.ptr);
  const py::ssize_t size = held.size * held.itemsize;
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

constexpr size_t kMostBuffers = 1024;  // IOV_MAX of Linux

struct Span {
  const char* data;
  py::ssize_t size;
};

// New objects of bytes, to be filled before anything else sees them; where they begin comes in `targets`.
py::list unfilled(const std::vector<py::ssize_t>& sizes, std::vector<char*>& targets) {
  py::list result(sizes.size());
  targets.reserve(sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    PyObject* made = PyBytes_FromStringAndSize(nullptr, sizes[i]);
    if (made == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(result.ptr(), i, made);
    targets.push_back(PyBytes_AS_STRING(made));
  }
  return result;
}

// New objects of bytes with these contents.
py::list copies_of(const std::vector<Span>& spans) {
  std::vector<py::ssize_t> sizes;
  sizes.reserve(spans.size());
  int64_t total = 0;
  for (const Span& span : spans) {
    sizes.push_back(span.size);
    total += span.size;
  }
  std::vector<char*> targets;
  py::list result = unfilled(sizes, targets);
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
py::list split_records(const py::buffer& piece, const py::object& ends_object, int64_t begin) {
  const Input<int64_t> ends(ends_object, "ends", 1);
  const py::buffer_info held = piece.request();
  const char* data = static_cast<const char*>(held.ptr);
  const py::ssize_t size = held.size * held.itemsize;
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

// Fills buffers with what lies in a file from an offset on; the number of bytes that there were, or -1 and errno.
int64_t read_into(int descriptor, std::vector<iovec>& buffers, int64_t offset) {
  int64_t total = 0;
  for (size_t at = 0; at < buffers.size();) {
    const int count = static_cast<int>(std::min(kMostBuffers, buffers.size() - at));
    ssize_t found = preadv(descriptor, buffers.data() + at, count, offset + total);
    if (found < 0 && errno == EINTR) continue;
    if (found < 0) return -1;
    if (found == 0) break;
    total += found;
    for (; at < buffers.size() && found >= static_cast<ssize_t>(buffers[at].iov_len); ++at) {
      found -= static_cast<ssize_t>(buffers[at].iov_len);
    }
    if (found > 0) {
      buffers[at].iov_base = static_cast<char*>(buffers[at].iov_base) + found;
      buffers[at].iov_len -= found;
    }
  }
  return total;
}

// The same as `split_records` of what a file has at an offset, which is read to where it stays.  None where the file has
// other lengths, or an earlier end.
py::object read_records(int descriptor, int64_t offset, const py::object& ends_object, int64_t begin) {
  const Input<int64_t> ends(ends_object, "ends", 1);
  std::vector<py::ssize_t> sizes;
  sizes.reserve(ends.size());
  int64_t start = begin;
  for (int64_t i = 0; i < ends.size(); ++i) {
    check(start + kLengthBytes <= ends.data()[i], "a record has no room for its length");
    sizes.push_back(ends.data()[i] - start - kLengthBytes);
    start = ends.data()[i];
  }
  std::vector<char*> targets;
  py::list result = unfilled(sizes, targets);
  std::vector<uint32_t> lengths(sizes.size());
  std::vector<iovec> buffers;
  buffers.reserve(2 * sizes.size());
  for (size_t i = 0; i < sizes.size(); ++i) {
    buffers.push_back({&lengths[i], kLengthBytes});
    buffers.push_back({targets[i], static_cast<size_t>(sizes[i])});
  }
  int64_t found;
  {
    const py::gil_scoped_release released;
    found = read_into(descriptor, buffers, offset);
  }
  if (found < 0) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw py::error_already_set();
  }
  if (found < start - begin) return py::none();
  for (size_t i = 0; i < sizes.size(); ++i) {
    if (static_cast<py::ssize_t>(lengths[i]) != sizes[i]) return py::none();
  }
  return result;
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
  module.def("read_records", &read_records, py::arg("descriptor"), py::arg("offset"), py::arg("ends"),
             py::arg("begin"));
  module.def("split_records", &split_records, py::arg("piece"), py::arg("ends"), py::arg("begin"));
}

}  // namespace elasticdl
