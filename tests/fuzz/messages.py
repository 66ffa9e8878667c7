"""Messages of elasticdl.proto with any values: those at the border of a type, of a rule, or with another meaning."""

from __future__ import annotations

import math
from random import Random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field

from elasticdl.rpc.validation import is_repeated

TAME = {
    Field.TYPE_INT32: (0, 0, 1, 1, 2, 3, 8, 16),
    Field.TYPE_INT64: (0, 0, 1, 1, 2, 8, 64, (1 << 32) + 1, (1 << 32) + 2),
    Field.TYPE_UINT32: (0, 1),
    Field.TYPE_DOUBLE: (0.0, 0.5, 100.0),
    Field.TYPE_STRING: ("", "a", "wide", "deep", "digits"),
    Field.TYPE_BYTES: (b"", bytes(8)),
}
_NUMBERS = (100, 1024, (1 << 20) + 1, 1 << 24, (1 << 31) - 1, -1, -(1 << 31))
_LARGE = (2 << 32, (2 << 32) + 5, 1 << 48, 1 << 60, (1 << 62) + 1, (1 << 63) - 1, -(1 << 63))
WILD = {
    Field.TYPE_INT32: _NUMBERS,
    Field.TYPE_INT64: (*_NUMBERS, *_LARGE),
    Field.TYPE_UINT32: ((1 << 32) - 1,),
    Field.TYPE_DOUBLE: (-1.0, 1e300, math.inf, -math.inf, math.nan),
    Field.TYPE_STRING: ("/", "../..", "é" * 20, "x" * 5000, "{}", "[1]", '{"a": ', "[" * 2000),
    Field.TYPE_BYTES: (bytes(7), bytes(16), b"\xff" * 100),
}


class Filler:
    """Fills messages: tame ones, which keep most rules and so come far, and wild ones."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._wildness = random.choice((0.0, 0.0, 0.02, 0.3))

    def fill(self, message: Any, depth: int = 0) -> Any:
        """Sets any of its fields."""
        for field in message.DESCRIPTOR.fields:
            if self._random.random() < 0.2:
                continue
            if is_repeated(field):
                self._fill_repeated(message, field, depth)
            elif field.message_type is None:
                setattr(message, field.name, self._value(field))
            elif depth < 3:
                getattr(message, field.name).SetInParent()
                self.fill(getattr(message, field.name), depth + 1)
        return message

    def _value(self, field: Field) -> Any:
        """Of a single field that is no message."""
        is_wild = self._random.random() < self._wildness
        if field.type == Field.TYPE_BOOL:
            return self._random.random() < 0.5
        if field.type == Field.TYPE_ENUM:
            return 77 if is_wild else self._random.choice(list(field.enum_type.values_by_number))
        if field.name == "address" and not is_wild:
            return self._random.choice(("127.0.0.1:9", "[::1]:9", "nowhere.invalid:9"))
        return self._random.choice((WILD if is_wild else TAME)[field.type])

    def _fill_repeated(self, message: Any, field: Field, depth: int) -> None:
        entries, number = getattr(message, field.name), self._random.choice((0, 1, 1, 2, 5))
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            of_value = field.message_type.fields_by_name["value"]
            for _ in range(number):
                entries[self._random.choice(TAME[Field.TYPE_STRING])] = self._value(of_value)
        elif field.message_type is None:
            entries.extend(self._value(field) for _ in range(number))
        elif depth < 3:
            for _ in range(number):
                self.fill(entries.add(), depth + 1)
