// The classes of `elasticdl.kernels._native`; _native.pyi documents each method.
#include <pybind11/stl.h>

#include <algorithm>
#include <memory>

#include "arrays.hpp"
#include "table.hpp"

namespace elasticdl {
namespace {

constexpr int64_t kLargestDim = int64_t{1} << 31;

py::object initial_rows(const Initializer& initializer, const py::object& ids_object, int64_t dim) {
  const Input<int64_t> ids(ids_object, "ids", 1);
  check(dim >= 1 && dim < kLargestDim, "dim is not a positive number of floats");
  auto result = new_array<float>({ids.size(), dim});
  float* rows = result.mutable_data();
  const py::gil_scoped_release released;
  for (int64_t i = 0; i < ids.size(); ++i) initializer.fill_row(ids.data()[i], dim, rows + i * dim);
  return result;
}

std::shared_ptr<Table> make_table(int64_t dim, const Initializer& initializer, const Rule& rule,
                                  const std::vector<double>& slot_initial, const Constraint& constraint,
                                  int64_t expected_rows) {
  check(dim >= 1 && dim < kLargestDim, "dim is not a positive number of floats");
  check(slot_initial.size() == rule.num_slots(),
        "there are not as many initial values as the optimizer has slots");
  check(expected_rows >= 0, "expected_rows is negative");
  std::vector<float> initial(slot_initial.begin(), slot_initial.end());
  const py::gil_scoped_release released;
  return std::make_shared<Table>(dim, initializer, rule, std::move(initial), constraint, expected_rows);
}

Input<int64_t> batch_of_ids(const py::object& object) {
  Input<int64_t> ids(object, "ids", 1);
  check(ids.size() <= Table::kLargestBatch, "more than 2,147,483,647 ids in one call");
  return ids;
}

void pull_into(Table& table, const py::object& ids_object, bool create, const py::object& out_object) {
  const Input<int64_t> ids = batch_of_ids(ids_object);
  Output<float> out(out_object, "out", 2);
  check(out.shape(0) == ids.size() && out.shape(1) == table.dim(), "out has not the shape [ids, dim]");
  float* rows = out.data();
  const py::gil_scoped_release released;
  table.pull(ids.data(), ids.size(), create, rows);
}

py::object pull(Table& table, const py::object& ids_object, bool create) {
  const Input<int64_t> ids = batch_of_ids(ids_object);
  auto result = new_array<float>({ids.size(), table.dim()});
  float* rows = result.mutable_data();
  const py::gil_scoped_release released;
  table.pull(ids.data(), ids.size(), create, rows);
  return result;
}

Input<float> rows_of(const Table& table, const py::object& object, const char* name, int64_t n) {
  Input<float> rows(object, name, 2);
  check(rows.shape(0) == n && rows.shape(1) == table.dim(), std::string(name) + " has not the shape [ids, dim]");
  return rows;
}

void apply(Table& table, const py::object& ids_object, const py::object& gradients_object,
           const std::vector<float>& scalars, float clip) {
  const Input<int64_t> ids = batch_of_ids(ids_object);
  const Input<float> gradients = rows_of(table, gradients_object, "gradients", ids.size());
  check(scalars.size() == table.rule().num_scalars(), "there are " + std::to_string(scalars.size()) + " scalars, not " +
                                                          std::to_string(table.rule().num_scalars()));
  const py::gil_scoped_release released;
  table.apply(ids.data(), gradients.data(), ids.size(), scalars.data(), clip);
}

void load(Table& table, const py::object& ids_object, const py::object& rows_object,
          const std::vector<py::object>& slot_objects) {
  const Input<int64_t> ids = batch_of_ids(ids_object);
  const Input<float> rows = rows_of(table, rows_object, "rows", ids.size());
  check(slot_objects.size() == table.rule().num_slots(),
        "there are not as many slots as the optimizer has");
  std::vector<Input<float>> kept;
  std::vector<const float*> slots;
  for (const py::object& object : slot_objects) {
    if (!object.is_none()) kept.push_back(rows_of(table, object, "a slot", ids.size()));
    slots.push_back(object.is_none() ? nullptr : kept.back().data());
  }
  const py::gil_scoped_release released;
  table.load(ids.data(), rows.data(), slots, ids.size());
}

py::object ids(Table& table) {
  std::unique_ptr<std::vector<int64_t>> found;
  {
    const py::gil_scoped_release released;
    found = std::make_unique<std::vector<int64_t>>(table.ids());
  }
  const auto* data = found->data();
  const auto size = static_cast<py::ssize_t>(found->size());
  py::capsule owner(found.release(), [](void* vector) { delete static_cast<std::vector<int64_t>*>(vector); });
  return py::array_t<int64_t>({size}, data, owner);
}

// Keeps its table alive, and thaws it when dropped.
class Frozen {
 public:
  explicit Frozen(std::shared_ptr<Table> table)
      : table_(std::move(table)), view_(table_->freeze()), size_(table_->num_frozen()) {}
  ~Frozen() { table_->thaw(view_); }
  Frozen(const Frozen&) = delete;
  Frozen& operator=(const Frozen&) = delete;

  int64_t size() const { return size_; }
  void close() { table_->thaw(view_); }
  Table& table() const { return *table_; }
  uint64_t view() const { return view_; }

 private:
  const std::shared_ptr<Table> table_;
  const uint64_t view_;
  const int64_t size_;
};

class Chunks {
 public:
  Chunks(std::shared_ptr<Frozen> frozen, int64_t max_rows)
      : frozen_(std::move(frozen)), max_rows_(max_rows), num_left_(frozen_->size()) {
    check(max_rows >= 1, "max_rows is not positive");
  }

  py::tuple next() {
    if (num_left_ == 0) throw py::stop_iteration();
    Table& table = frozen_->table();
    const int64_t n = std::min(max_rows_, num_left_);
    auto ids = new_array<int64_t>({n});
    auto rows = new_array<float>({n, table.dim()});
    py::list slots;
    std::vector<float*> slots_data;
    for (size_t slot = 0; slot < table.rule().num_slots(); ++slot) {
      auto values = new_array<float>({n, table.dim()});
      slots_data.push_back(values.mutable_data());
      slots.append(values);
    }
    int64_t* ids_data = ids.mutable_data();
    float* rows_data = rows.mutable_data();
    {
      const py::gil_scoped_release released;
      table.read_frozen(frozen_->view(), &cursor_, n, ids_data, rows_data, slots_data);
    }
    num_left_ -= n;
    return py::make_tuple(ids, rows, slots);
  }

 private:
  const std::shared_ptr<Frozen> frozen_;
  const int64_t max_rows_;
  int64_t num_left_;
  Table::Cursor cursor_;
};

}  // namespace

void bind_tables(py::module_& module) {
  using released = py::call_guard<py::gil_scoped_release>;
  py::class_<Initializer>(module, "Initializer")
      .def(py::init<const std::string&, uint64_t, double, double>(), py::arg("kind"), py::arg("key"), py::arg("a"),
           py::arg("b") = 0.0)
      .def("rows", &initial_rows, py::arg("ids"), py::arg("dim"));
  py::class_<Constraint>(module, "Constraint")
      .def(py::init<const std::string&, double, double, double>(), py::arg("kind") = "none", py::arg("a") = 0.0,
           py::arg("b") = 0.0, py::arg("rate") = 1.0);
  py::class_<Table, std::shared_ptr<Table>>(module, "Table")
      .def(py::init(&make_table), py::arg("dim"), py::arg("initializer"), py::arg("optimizer"), py::arg("slot_initial"),
           py::arg("constraint"), py::arg("expected_rows") = 0)
      .def_property_readonly("dim", &Table::dim)
      .def("__len__", &Table::size)
      .def("memory_bytes", &Table::memory_bytes)
      .def("pull", &pull, py::arg("ids"), py::arg("create"))
      .def("pull_into", &pull_into, py::arg("ids"), py::arg("create"), py::arg("out"))
      .def("apply", &apply, py::arg("ids"), py::arg("gradients"), py::arg("scalars"), py::arg("clip") = 0.0)
      .def("load", &load, py::arg("ids"), py::arg("rows"), py::arg("slots"))
      .def("ids", &ids)
      .def("freeze", [](const std::shared_ptr<Table>& table) { return std::make_shared<Frozen>(table); }, released());
  py::class_<Frozen, std::shared_ptr<Frozen>>(module, "Frozen")
      .def("__len__", &Frozen::size)
      .def("chunks", [](const std::shared_ptr<Frozen>& frozen, int64_t max_rows) { return Chunks(frozen, max_rows); },
           py::arg("max_rows"))
      .def("close", &Frozen::close, released());
  py::class_<Chunks>(module, "_Chunks")
      .def("__iter__", [](py::object self) { return self; })
      .def("__next__", &Chunks::next);
}

}  // namespace elasticdl
