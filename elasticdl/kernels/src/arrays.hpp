// NumPy arrays as the kernels take them: C-contiguous, of exactly one type, never converted.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <numeric>
#include <string>
#include <vector>

namespace elasticdl {

namespace py = pybind11;

constexpr int kAnyDimensions = -1;

inline bool is_contiguous(const py::array& array) { return (array.flags() & py::array::c_style) != 0; }

inline bool is_aligned(const py::array& array) {
  return (array.flags() & py::detail::npy_api::NPY_ARRAY_ALIGNED_) != 0;
}

// Throws ValueError if `object` is not a C-contiguous array of T with this number of dimensions.
template <typename T>
py::array checked_array(const py::handle& object, const char* name, int num_dimensions) {
  if (!py::isinstance<py::array_t<T>>(object)) {
    const std::string type = py::str(py::dtype::of<T>());  // here only: it takes microseconds
    throw py::value_error(std::string(name) + " is not an array of " + type);
  }
  auto array = py::reinterpret_borrow<py::array>(object);
  if (!is_contiguous(array)) throw py::value_error(std::string(name) + " is not C-contiguous");
  if (num_dimensions != kAnyDimensions && array.ndim() != num_dimensions) {
    throw py::value_error(std::string(name) + " has " + std::to_string(array.ndim()) + " dimensions, not " +
                          std::to_string(num_dimensions));
  }
  return array;
}

// An array to read; kept alive by this.
template <typename T>
class Input {
 public:
  Input(const py::handle& object, const char* name, int num_dimensions = kAnyDimensions)
      : array_(checked_array<T>(object, name, num_dimensions)) {
    if (!is_aligned(array_)) array_ = py::array(array_.attr("copy")());
  }

  const T* data() const { return static_cast<const T*>(array_.data()); }
  int64_t size() const { return array_.size(); }
  int64_t shape(int dimension) const { return array_.shape(dimension); }
  std::vector<py::ssize_t> shape() const { return {array_.shape(), array_.shape() + array_.ndim()}; }

 private:
  py::array array_;
};

// An array to write into; kept alive by this.
template <typename T>
class Output {
 public:
  Output(const py::handle& object, const char* name, int num_dimensions = kAnyDimensions)
      : array_(checked_array<T>(object, name, num_dimensions)) {
    if (!is_aligned(array_)) throw py::value_error(std::string(name) + " is not aligned");
    if (!array_.writeable()) throw py::value_error(std::string(name) + " is read-only");
  }

  T* data() { return static_cast<T*>(array_.mutable_data()); }
  int64_t size() const { return array_.size(); }
  int64_t shape(int dimension) const { return array_.shape(dimension); }
  std::vector<py::ssize_t> shape() const { return {array_.shape(), array_.shape() + array_.ndim()}; }

 private:
  py::array array_;
};

constexpr uintptr_t kCacheLine = 64;

// A new array, its values not set.  It begins where a cache line does: TensorFlow takes such arrays without a copy.
template <typename T>
py::array_t<T> new_array(std::vector<py::ssize_t> shape) {
  const auto size = std::accumulate(shape.begin(), shape.end(), py::ssize_t{1}, std::multiplies<>());
  // Not `aligned_alloc`: its freed memory serves the next array of the same size badly.
  void* memory = std::malloc(static_cast<size_t>(size) * sizeof(T) + kCacheLine);
  if (memory == nullptr) throw std::bad_alloc();
  const py::capsule owner(memory, [](void* owned) { std::free(owned); });
  const auto address = reinterpret_cast<uintptr_t>(memory);
  auto* first = reinterpret_cast<T*>((address + kCacheLine - 1) / kCacheLine * kCacheLine);
  return py::array_t<T>(std::move(shape), first, owner);
}

inline void check(bool right, const std::string& text) {
  if (!right) throw py::value_error(text);
}

void bind_frame_io(py::module_& module);
void bind_meshes(py::module_& module);
void bind_message_rules(py::module_& module);
void bind_optimizers(py::module_& module);
void bind_record_layers(py::module_& module);
void bind_records(py::module_& module);
void bind_tables(py::module_& module);

}  // namespace elasticdl
