// Rules of protobuf messages, looked at in their bytes: a message that surely keeps them need not be looked at field by
// field in Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace elasticdl {

enum class FieldKind : uint8_t { kNone, kBool, kInt32, kInt64, kEnum, kFinite, kAnyDouble, kText, kMessage };

struct FieldRule {
  FieldKind kind = FieldKind::kNone;
  bool is_repeated = false;
  bool is_needed = false;  // it must be there, and not be 0 or empty
  int64_t least = 0;
  int64_t most = 0;  // of a number; the length of a text; the bits of an enum's known values
  uint32_t max_items = 0;
  uint32_t message = 0;  // the rules of a message's own fields
};

struct MessageRule {
  std::vector<FieldRule> fields;  // by number
  uint64_t needed = 0;            // bits by number
  bool is_known = true;           // false: it has rules beside these, so nothing of it is sure
};

class MessageRules {
 public:
  explicit MessageRules(std::vector<MessageRule> messages) : messages_(std::move(messages)) {}

  // Whether the bytes of a message of a type, which protobuf can read, surely keep all rules.  False says nothing:
  // unknown fields and those that are there twice are not looked at here.
  bool surely_keeps(uint32_t message, const uint8_t* bytes, size_t size) const {
    return keeps(messages_.at(message), bytes, bytes + size, 0);
  }

 private:
  bool keeps(const MessageRule& rule, const uint8_t* place, const uint8_t* end, int depth) const;

  std::vector<MessageRule> messages_;
};

}  // namespace elasticdl
