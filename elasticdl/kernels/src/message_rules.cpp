#include "message_rules.hpp"

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <tuple>

#include "arrays.hpp"

namespace elasticdl {
namespace {

constexpr int kMaxDepth = 16;
constexpr uint32_t kMaxFields = 64;

// Numbers of the wire format.
constexpr uint32_t kVarint = 0, kFixed64 = 1, kLengthDelimited = 2;

// Whether there is one; it is at most 10 bytes long.
bool read_varint(const uint8_t*& place, const uint8_t* end, uint64_t& value) {
  value = 0;
  for (int shift = 0; shift < 70 && place < end; shift += 7) {
    const uint8_t byte = *place++;
    value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

bool keeps_number(const FieldRule& rule, uint64_t raw) {
  int64_t value = static_cast<int64_t>(raw);
  switch (rule.kind) {
    case FieldKind::kBool:
      return true;
    case FieldKind::kEnum:
      return raw < 63 && (static_cast<uint64_t>(rule.most) >> raw & 1) != 0;
    case FieldKind::kInt32:
      if (value != static_cast<int32_t>(value)) return false;  // it is read as another number, maybe 0
      [[fallthrough]];
    case FieldKind::kInt64:
      return (value == 0 && !rule.is_repeated) || (rule.least <= value && value <= rule.most);
    default:
      return false;
  }
}

bool keeps_double(const FieldRule& rule, const uint8_t* place) {
  uint64_t bits;
  std::memcpy(&bits, place, sizeof bits);  // little-endian, as the machines that this is built for
  constexpr uint64_t kExponent = 0x7ffull << 52;
  return rule.kind == FieldKind::kAnyDouble || (rule.kind == FieldKind::kFinite && (bits & kExponent) != kExponent);
}

// Numbers one after the other, as lists of them are written; counts them.
bool keeps_packed(const FieldRule& rule, const uint8_t* place, const uint8_t* end, uint32_t& count) {
  const bool is_double = rule.kind == FieldKind::kFinite || rule.kind == FieldKind::kAnyDouble;
  while (place < end) {
    if (++count > rule.max_items) return false;
    if (is_double) {
      if (end - place < 8 || !keeps_double(rule, place)) return false;
      place += 8;
    } else {
      uint64_t value;
      if (!read_varint(place, end, value) || !keeps_number(rule, value)) return false;
    }
  }
  return true;
}

}  // namespace

bool MessageRules::keeps(const MessageRule& rule, const uint8_t* place, const uint8_t* end, int depth) const {
  if (!rule.is_known || depth > kMaxDepth) return false;
  uint32_t counts[kMaxFields] = {};
  uint64_t given = 0;
  while (place < end) {
    uint64_t tag, value = 0;
    if (!read_varint(place, end, tag) || tag >> 3 >= rule.fields.size()) return false;
    const auto number = static_cast<uint32_t>(tag >> 3), wire_type = static_cast<uint32_t>(tag & 7);
    const FieldRule& field = rule.fields[number];
    uint32_t& count = counts[number];
    if (!field.is_repeated && count > 0) return false;  // the later one counts, and messages are merged
    bool is_given = true;
    if (wire_type == kVarint) {
      if (!read_varint(place, end, value) || !keeps_number(field, value)) return false;
      is_given = value != 0;
      ++count;
    } else if (wire_type == kFixed64) {
      if (end - place < 8 || !keeps_double(field, place)) return false;
      place += 8;
      ++count;
    } else if (wire_type == kLengthDelimited) {
      if (!read_varint(place, end, value) || value > static_cast<uint64_t>(end - place)) return false;
      const uint8_t* const inner_end = place + value;
      if (field.kind == FieldKind::kText) {
        if (value > static_cast<uint64_t>(field.most)) return false;
        is_given = value > 0;
        ++count;
      } else if (field.kind == FieldKind::kMessage) {
        if (!keeps(messages_[field.message], place, inner_end, depth + 1)) return false;
        ++count;
      } else if (!field.is_repeated || !keeps_packed(field, place, inner_end, count)) {
        return false;
      }
      place = inner_end;
    } else {
      return false;
    }
    if (field.is_repeated && count > field.max_items) return false;
    if (is_given) given |= uint64_t{1} << number;
  }
  return (rule.needed & ~given) == 0;
}

namespace {

// number, kind, is_repeated, is_needed, least, most, max_items, message
using Row = std::tuple<uint32_t, std::string, bool, bool, int64_t, int64_t, uint32_t, uint32_t>;

MessageRules made(const std::vector<std::pair<bool, std::vector<Row>>>& messages) {
  static const std::map<std::string, FieldKind> kKinds = {
      {"bool", FieldKind::kBool},     {"int32", FieldKind::kInt32},       {"int64", FieldKind::kInt64},
      {"enum", FieldKind::kEnum},     {"finite", FieldKind::kFinite},     {"double", FieldKind::kAnyDouble},
      {"text", FieldKind::kText},     {"message", FieldKind::kMessage},
  };
  std::vector<MessageRule> rules;
  for (const auto& [is_known, rows] : messages) {
    MessageRule rule;
    rule.is_known = is_known;
    for (const auto& [number, kind, is_repeated, is_needed, least, most, max_items, message] : rows) {
      const auto known = kKinds.find(kind);
      check(known != kKinds.end(), "no such kind of a field");
      check(0 < number && number < kMaxFields, "a field's number is 64 or more");
      check(message < messages.size(), "a field's message is none of those given");
      if (rule.fields.size() <= number) rule.fields.resize(number + 1);
      rule.fields[number] = {known->second, is_repeated, is_needed, least, most, max_items, message};
      if (is_needed) rule.needed |= uint64_t{1} << number;
    }
    rules.push_back(std::move(rule));
  }
  return MessageRules(std::move(rules));
}

// Without giving up the GIL: it takes less time than that.
bool surely_keeps(const MessageRules& rules, uint32_t message, const py::bytes& data) {
  char* bytes;
  Py_ssize_t size;
  if (PyBytes_AsStringAndSize(data.ptr(), &bytes, &size) != 0) throw py::error_already_set();
  return rules.surely_keeps(message, reinterpret_cast<const uint8_t*>(bytes), static_cast<size_t>(size));
}

}  // namespace

void bind_message_rules(py::module_& module) {
  py::class_<MessageRules>(module, "MessageRules")
      .def(py::init(&made), py::arg("messages"))
      .def("surely_keeps", &surely_keeps, py::arg("message"), py::arg("data"));
}

}  // namespace elasticdl
