// The Python module `elasticdl.kernels._native`; _native.pyi documents each function.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <limits>
#include <optional>

#include "arrays.hpp"
#include "crc32.hpp"
#include "crc32c.hpp"
#include "floats.hpp"
#include "hashing.hpp"
#include "rows.hpp"

namespace elasticdl {
namespace {

void check_batch(int64_t n) {
  check(n <= std::numeric_limits<int32_t>::max(), "more than 2,147,483,647 ids or rows in one call");
}

py::tuple unique(const py::object& ids_object) {
  const Input<int64_t> ids(ids_object, "ids", 1);
  check_batch(ids.size());
  auto positions = new_array<int32_t>({ids.size()});
  std::unique_ptr<int64_t[]> found;
  int64_t count = 0;
  {
    int32_t* positions_data = positions.mutable_data();
    const py::gil_scoped_release released;
    found.reset(new int64_t[ids.size()]);
    count = find_unique(ids.data(), ids.size(), found.get(), positions_data);
  }
  auto unique_ids = new_array<int64_t>({count});
  std::copy_n(found.get(), count, unique_ids.mutable_data());
  return py::make_tuple(unique_ids, positions);
}

py::object gather(const py::object& rows_object, const py::object& positions_object, const py::object& out_object) {
  const Input<float> rows(rows_object, "rows", 2);
  const Input<int32_t> positions(positions_object, "positions", 1);
  const int64_t n = positions.size(), dim = rows.shape(1);
  py::object result = out_object;
  if (out_object.is_none()) result = new_array<float>({n, dim});
  Output<float> out(result, "out", 2);
  check(out.shape(0) >= n && out.shape(1) == dim, "out has not the shape of the gathered rows");
  bool within = false;
  {
    float* out_data = out.data();
    const py::gil_scoped_release released;
    within = all_within(positions.data(), n, rows.shape(0));
    if (within) gather_rows(rows.data(), positions.data(), n, dim, out_data);
  }
  check(within, "a position is outside of the rows");
  return result;
}

py::object sum_by_position(const py::object& gradients_object, const py::object& positions_object, int64_t num_unique) {
  const Input<float> gradients(gradients_object, "gradients", 2);
  const Input<int32_t> positions(positions_object, "positions", 1);
  const int64_t n = positions.size(), dim = gradients.shape(1);
  check(gradients.shape(0) == n, "there are not as many gradients as positions");
  check(num_unique >= 0, "num_unique is negative");
  auto result = new_array<float>({num_unique, dim});
  bool within = false;
  {
    float* sums = result.mutable_data();
    const py::gil_scoped_release released;
    within = all_within(positions.data(), n, num_unique);
    if (within) sum_rows(gradients.data(), positions.data(), n, dim, num_unique, sums);
  }
  check(within, "a position is not below num_unique");
  return result;
}

py::list split(const py::object& ids_object, const py::object& owners_object, int64_t num_ps) {
  const Input<int64_t> ids(ids_object, "ids", 1);
  const Input<uint16_t> owners(owners_object, "owners", 1);
  check_batch(ids.size());
  check(owners.size() == kNumBuckets, "owners has not one entry for each of the 1,024 buckets");
  const int64_t largest = *std::max_element(owners.data(), owners.data() + kNumBuckets);
  check(largest < num_ps, "a bucket belongs to PS " + std::to_string(largest) + " of " + std::to_string(num_ps));
  const int64_t n = ids.size();
  std::unique_ptr<uint16_t[]> found;
  std::vector<int64_t> counts(num_ps);
  {
    const py::gil_scoped_release released;
    found.reset(new uint16_t[n]);
    find_owners(ids.data(), n, owners.data(), found.get());
    for (int64_t i = 0; i < n; ++i) ++counts[found[i]];
  }
  py::list result;
  std::vector<int32_t*> next;
  for (const int64_t count : counts) {
    auto positions = new_array<int32_t>({count});
    next.push_back(positions.mutable_data());
    result.append(positions);
  }
  const py::gil_scoped_release released;
  for (int64_t i = 0; i < n; ++i) *next[found[i]]++ = static_cast<int32_t>(i);
  return result;
}

py::object buckets(const py::object& ids_object) {
  const Input<int64_t> ids(ids_object, "ids", 1);
  auto result = new_array<uint16_t>({ids.size()});
  uint16_t* found = result.mutable_data();
  const py::gil_scoped_release released;
  find_buckets(ids.data(), ids.size(), found);
  return result;
}

template <uint32_t (*kChecksum)(uint32_t, const void*, size_t)>
uint32_t checksum(const py::object& data, uint32_t before) {
  Py_buffer view;
  if (PyObject_GetBuffer(data.ptr(), &view, PyBUF_SIMPLE) != 0) {
    PyErr_Clear();
    throw py::value_error("data is not C-contiguous and bytes-like");
  }
  uint32_t result;
  if (view.len < 256) {
    result = kChecksum(before, view.buf, static_cast<size_t>(view.len));
  } else {
    const py::gil_scoped_release released;
    result = kChecksum(before, view.buf, static_cast<size_t>(view.len));
  }
  PyBuffer_Release(&view);
  return result;
}

template <typename From, typename To, void (*kConvert)(const From*, int64_t, To*)>
py::object converted(const py::object& values_object) {
  const Input<From> values(values_object, "values");
  auto result = new_array<To>(values.shape());
  To* data = result.mutable_data();
  const py::gil_scoped_release released;
  kConvert(values.data(), values.size(), data);
  return result;
}

bool is_within(const py::object& ids_object, int64_t bound) {
  const Input<int64_t> ids(ids_object, "ids");
  const py::gil_scoped_release released;
  return ids_within(ids.data(), ids.size(), bound);
}

bool is_finite(const py::object& values_object) {
  const Input<float> values(values_object, "values");
  const py::gil_scoped_release released;
  return all_finite(values.data(), values.size());
}

}  // namespace
}  // namespace elasticdl

PYBIND11_MODULE(_native, module) {
  using namespace elasticdl;
  module.doc() = "C++ kernels; _native.pyi says what they do.";
  bind_record_layers(module);  // which the next two take
  bind_frame_io(module);
  bind_meshes(module);
  bind_message_rules(module);
  bind_optimizers(module);
  bind_records(module);
  bind_tables(module);
  module.def("unique", &unique, py::arg("ids"));
  module.def("gather", &gather, py::arg("rows"), py::arg("positions"), py::arg("out") = py::none());
  module.def("sum_rows", &sum_by_position, py::arg("gradients"), py::arg("positions"), py::arg("num_unique"));
  module.def("split", &split, py::arg("ids"), py::arg("owners"), py::arg("num_ps"));
  module.def("buckets", &buckets, py::arg("ids"));
  module.def("has_crc32", &has_crc32);
  module.def("crc32", &checksum<&crc32>, py::arg("data"), py::arg("checksum") = 0);
  module.def("crc32c", &checksum<&crc32c>, py::arg("data"), py::arg("checksum") = 0);
  module.def("_crc32c_portable", &checksum<&crc32c_portable>, py::arg("data"), py::arg("checksum") = 0);
  module.def("to_half", &converted<float, uint16_t, &to_half>, py::arg("values"));
  module.def("from_half", &converted<uint16_t, float, &from_half>, py::arg("values"));
  module.def("to_bfloat16", &converted<float, uint16_t, &to_bfloat16>, py::arg("values"));
  module.def("from_bfloat16", &converted<uint16_t, float, &from_bfloat16>, py::arg("values"));
  module.def("all_within", &is_within, py::arg("ids"), py::arg("bound"));
  module.def("all_finite", &is_finite, py::arg("values"));
}
