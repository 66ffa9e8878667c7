"""Rules for messages: checked at the edge of every server, before anything else of a message is read.

Every field has a rule.  Most follow from the type in elasticdl.proto: integers are not negative, floats are finite,
enums are known, texts and lists have a maximum length.  `FIELDS` has the exceptions, `MESSAGES` the rules across fields
of one message.  The native `MessageRules` checks a message's bytes against the same tables, so only messages that may
break a rule are checked here, field by field.  Whether a message fits the job is not checked here: unknown ids are
well-formed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from elasticdl.kernels import _native
from elasticdl.rpc import elasticdl_pb2 as pb
from elasticdl.task_numbers import BLOCK_SIZE

M = TypeVar("M", bound=Message)
Check = Callable[[Any], str]  # returns the fault, beginning with its path from here; empty: none

MAX_GENERATION = (1 << 31) - 1  # it has 32 bits of a lease id, with the sign
MAX_EPOCH = 1 << 24
MAX_MINIBATCHES = 1 << 20  # in a task
MAX_RECORDS = 1 << 48  # in a shard
NUM_BUCKETS = 1024
_GREATEST_INT32 = (1 << 31) - 1
_KEYS = 4 << 10  # characters of names and paths
_TEXT = 1 << 20  # characters of errors, tracebacks and configurations
_MANY = 1 << 22  # items: as many as fit into a message


class InvalidMessage(ValueError):
    """A message breaks a rule; the text names the field."""


@dataclass(frozen=True, slots=True)
class Rule:
    """The rule of one field; options that do not apply to its type are ignored.

    Attributes:
        least, most: Range of a number; the default is the range of its type without negative numbers.
        max_length: Most characters of a text.
        max_items: Most items of a list or map.
        is_finite: A float must be finite.
        is_json: A text must be empty or a JSON object.
        is_address: A text must be empty or ``host:port``, with an IPv4 address, an IPv6 address in brackets, or a DNS
            name.
        is_needed: The field must be set, and an enum or number must not be 0.
    """

    least: int = 0
    most: int = (1 << 63) - 1
    max_length: int = _KEYS
    max_items: int = 4096
    is_finite: bool = True
    is_json: bool = False
    is_address: bool = False
    is_needed: bool = False


_EPOCH = Rule(most=MAX_EPOCH)
_MINIBATCH = Rule(most=MAX_MINIBATCHES, max_items=_MANY)
_GENERATION = Rule(most=MAX_GENERATION)
_LONG = Rule(max_length=_TEXT)
_JSON = Rule(max_length=_TEXT, is_json=True)
_LISTED = Rule(max_items=_MANY)
_ANY_FLOAT = Rule(is_finite=False)
_ANY_NUMBER = Rule(least=-(1 << 63))
_NEEDED = Rule(is_needed=True)
_ADDRESS = Rule(max_length=300, is_address=True)
_OWN_ADDRESS = Rule(max_length=300, is_address=True, is_needed=True)
_SOME = Rule(least=1, is_needed=True)

FIELDS: Mapping[str, Rule] = {
    "AppliedRun.epoch": _EPOCH,
    "AppliedRun.num_tasks": Rule(most=BLOCK_SIZE),
    "AppliedRun.watermark": _MINIBATCH,
    "AppliedSet.runs": _LISTED,
    "AppliedSet.tasks": _LISTED,
    "AppliedTask.epoch": _EPOCH,
    "AppliedTask.extras": _MINIBATCH,
    "AppliedTask.skipped": _MINIBATCH,
    "AppliedTask.watermark": _MINIBATCH,
    "Array.data": Rule(max_length=64 << 20),
    "Array.shape": Rule(max_items=16),
    "BucketRange.end": Rule(most=NUM_BUCKETS),
    "BucketRange.start": Rule(most=NUM_BUCKETS),
    "CloseRoundRequest.name": _NEEDED,
    "EvaluationReport.results": _ANY_FLOAT,
    "FailedTask.bad_records": _LISTED,
    "FailedTask.details": _LONG,
    "FailedTask.error": _LONG,
    "FailedTask.minibatch": Rule(least=-1, most=MAX_MINIBATCHES),
    "FinishedTask.num_minibatches": _MINIBATCH,
    "HeartbeatRequest.role": _NEEDED,
    "HeldLease.committed": _MINIBATCH,
    "HeldLease.lease": _NEEDED,
    "InitializeHeader.optimizer": _JSON,
    "InitializeHeader.seed": _ANY_NUMBER,
    "InitializeHeader.tables": Rule(max_items=1 << 16),
    "Lease.committed": _MINIBATCH,
    "Lease.epoch": _EPOCH,
    "Lease.excluded": _LISTED,
    "Lease.type": _NEEDED,
    "MetricsReport.metrics": _ANY_FLOAT,
    "MinibatchName.epoch": _EPOCH,
    "MinibatchName.n": _MINIBATCH,
    "ModelReport.callbacks": _JSON,
    "ModelReport.error": _LONG,
    "ModelReport.error_details": _LONG,
    "ModelReport.optimizer": _JSON,
    "ModelReport.prediction_shards": _LISTED,
    "ModelReport.tables": Rule(max_items=1 << 16),
    "ModelReport.training_shards": _LISTED,
    "ModelReport.validation_shards": _LISTED,
    "ModelReport.variables": Rule(max_items=1 << 20),
    "Occasion.logs": _ANY_FLOAT,
    "Plan.minibatch_size": _SOME,
    "Plan.num_epochs": _ANY_NUMBER,
    "Plan.num_minibatches_per_task": Rule(least=1, most=MAX_MINIBATCHES, is_needed=True),
    "Position.minibatch": _MINIBATCH,
    "ProgressReport.committed": _MINIBATCH,
    "ProgressReport.loss": _ANY_FLOAT,
    "ProgressReport.not_finite": _LONG,
    "ProgressReport.skipped": _MINIBATCH,
    "PsAddress.address": _ADDRESS,
    "PsQuestion.generation": _GENERATION,
    "PsReadyRequest.error": _LONG,
    "PsReadyRequest.damaged": Rule(max_length=_TEXT),
    "Push.epoch": _EPOCH,
    "Push.minibatch": _MINIBATCH,
    "Pull.tables": Rule(max_items=1 << 16),
    "Push.tables": Rule(max_items=1 << 16),
    "Push.unreached": Rule(max_items=1 << 16),
    "ReadyForGroupRequest.address": _OWN_ADDRESS,
    "ReadyForGroupRequest.reason": _LONG,
    "RegisterPsRequest.address": _OWN_ADDRESS,
    "SaveCheckpointRequest.generation": _GENERATION,
    "SaveCheckpointRequest.num_ps": _SOME,
    "SessionReport.event": _NEEDED,
    "ShardMessage.end": Rule(most=MAX_RECORDS),
    "ShardMessage.identity": Rule(max_length=_TEXT),
    "ShardMessage.name": Rule(max_length=1 << 16),
    "ShardMessage.start": Rule(most=MAX_RECORDS),
    "Stacks.text": Rule(max_length=1 << 16),
    "Surplus.count": _ANY_NUMBER,
    "Table.constraint": _JSON,
    "Table.dim": Rule(least=1, most=1 << 20, is_needed=True),
    "Table.initializer": _JSON,
    "TaskStandingRequest.epoch": _EPOCH,
    "Variable.shape": Rule(max_items=64),
    "GroupMember.address": _ADDRESS,
}


def _in_order(message: Any) -> str:
    return "" if message.start <= message.end else f".end is {message.end}, before its start {message.start}"


def _array_fits(message: pb.Array) -> str:
    needed = 8 * math.prod(message.shape)
    return "" if len(message.data) == needed else f".data has {len(message.data)} bytes, its shape needs {needed}"


MESSAGES: Mapping[str, Check] = {
    "Array": _array_fits,
    "BucketRange": _in_order,
    "ShardMessage": _in_order,
}

_PORT = re.compile(r"[1-9][0-9]{0,4}")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*\.?")  # of DNS; container engines also use _ in host names

_TYPES = FieldDescriptor
_NUMBERS = (_TYPES.TYPE_INT32, _TYPES.TYPE_INT64, _TYPES.TYPE_UINT32)


class _Checker:
    """Checks all rules of one message type, and describes faults."""

    def __init__(self, descriptor: Descriptor) -> None:
        self._descriptor = descriptor
        self._whole = MESSAGES.get(descriptor.name)
        self._fields: tuple[tuple[str, Check, bool, bool], ...] = ()  # name, check, is needed, is one message

    def complete(self, checkers: Mapping[str, _Checker]) -> None:
        """Build the checks; `checkers` has one checker for every type."""
        rules = [(field, _rule_of(self._descriptor, field)) for field in self._descriptor.fields]
        fields = [
            (
                field.name,
                _check_of(field, rule, checkers),
                rule.is_needed,
                field.message_type is not None and not is_repeated(field),
            )
            for field, rule in rules
            if field.type != _TYPES.TYPE_BOOL
        ]
        self._fields = tuple(sorted(fields, key=lambda field: field[3]))

    def fault(self, message: Any) -> str:
        """Describe the fault of a message; empty if it has none."""
        for name, check, is_needed, is_message in self._fields:
            value = getattr(message, name)
            if message.HasField(name) if is_message else value:  # empty values, 0 and False keep every rule
                if fault := check(value):
                    return f".{name}{fault}"
            elif is_needed:
                return f".{name} is missing"
        return self._whole(message) if self._whole is not None else ""


def _rule_of(descriptor: Descriptor, field: FieldDescriptor) -> Rule:
    return FIELDS.get(f"{descriptor.name}.{field.name}", Rule())


def is_repeated(field: FieldDescriptor) -> bool:
    """Return whether a field is a list; protobuf before 6 has it as a label, which later versions deprecate."""
    old: Any = field
    return bool(field.is_repeated if hasattr(field, "is_repeated") else old.label == old.LABEL_REPEATED)


def _made(descriptors: Iterable[Descriptor]) -> dict[str, _Checker]:
    checkers = {descriptor.name: _Checker(descriptor) for descriptor in descriptors}
    for checker in checkers.values():
        checker.complete(checkers)
    return checkers


def _check_of(field: FieldDescriptor, rule: Rule, checkers: Mapping[str, _Checker]) -> Check:
    inner = field.message_type
    if inner is not None and inner.GetOptions().map_entry:
        return _of_map(_of_value(inner.fields_by_name["value"], rule, checkers), rule)
    one = _of_value(field, rule, checkers)
    if not is_repeated(field):
        return one
    return _of_numbers(one, rule) if field.type in _NUMBERS else _of_list(one, rule)


def _of_value(field: FieldDescriptor, rule: Rule, checkers: Mapping[str, _Checker]) -> Check:
    if field.message_type is not None:
        return checkers[field.message_type.name].fault
    if field.enum_type is not None:
        known = field.enum_type.values_by_number
        return lambda value: "" if value in known else f" is {value}, which is unknown"
    if field.type == _TYPES.TYPE_DOUBLE:
        return _of_float(rule)
    if field.type in (_TYPES.TYPE_STRING, _TYPES.TYPE_BYTES):
        return _of_text(rule)
    if field.type == _TYPES.TYPE_INT32:
        return _of_number(rule.least, min(rule.most, _GREATEST_INT32))
    return _of_number(rule.least, rule.most)


def _of_number(least: int, most: int) -> Check:
    wanted = f"in {least} … {most}" if most < _GREATEST_INT32 else f"{least} or more"
    return lambda value: "" if least <= value <= most else f" is {value}, not {wanted}"


def _of_float(rule: Rule) -> Check:
    if not rule.is_finite:
        return lambda value: ""
    return lambda value: "" if math.isfinite(value) else f" is {value}, not finite"


def _of_text(rule: Rule) -> Check:
    longest = rule.max_length

    def check(value: str | bytes) -> str:
        if len(value) > longest:
            return f" has a length of {len(value)}, more than {longest}"
        if rule.is_address and not _is_address(str(value)):
            return f" is {value!r}, no host:port"
        return _fault_of_json(value) if rule.is_json and value else ""

    return check


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    if not _PORT.fullmatch(port) or int(port) > 65535:
        return False
    try:
        if host.startswith("[") and host.endswith("]"):
            return bool(IPv6Address(host[1:-1]))
        if host.replace(".", "").isdigit():
            return bool(IPv4Address(host))
    except ValueError:
        return False
    return len(host) <= 253 and _NAME.fullmatch(host) is not None


def _fault_of_json(value: str | bytes) -> str:
    try:
        return "" if isinstance(json.loads(value), dict) else " is not a JSON object"
    except (ValueError, RecursionError):
        return " is no JSON"


def _of_numbers(one: Check, rule: Rule) -> Check:
    def check(values: Any) -> str:
        if len(values) > rule.max_items:
            return _too_many(values, rule)
        return one(min(values)) or one(max(values))

    return check


def _of_list(one: Check, rule: Rule) -> Check:
    def check(values: Any) -> str:
        if len(values) > rule.max_items:
            return _too_many(values, rule)
        for index, value in enumerate(values):
            fault = one(value)
            if fault:
                return f"[{index}]{fault}"
        return ""

    return check


def _of_map(one: Check, rule: Rule) -> Check:
    def check(values: Any) -> str:
        if len(values) > rule.max_items:
            return _too_many(values, rule)
        for key in values:
            if fault := one(values[key]) or (f" has a length of {len(key)}" if len(key) > _KEYS else ""):
                return f"[{key[:80]!r}]{fault}"
        return ""

    return check


def _too_many(values: Any, rule: Rule) -> str:
    return f" has {len(values)} items, more than {rule.max_items}"


_CHECKERS = _made(pb.DESCRIPTOR.message_types_by_name.values())

Row = tuple[int, str, bool, bool, int, int, int, int]  # one field, as an argument of `MessageRules`


class _Rules:
    """The same rules, checked on the bytes of a message, which is enough for most messages.

    Attributes:
        places: Index of each message type in the rules.
    """

    def __init__(self, descriptors: Sequence[Descriptor]) -> None:
        self.places: dict[str, int] = {descriptor.name: place for place, descriptor in enumerate(descriptors)}
        self._maps: list[tuple[bool, list[Row]]] = []
        messages = [
            (
                descriptor.name not in MESSAGES,
                [self._row(field, _rule_of(descriptor, field)) for field in descriptor.fields],
            )
            for descriptor in descriptors
        ]
        self.native = _native.MessageRules(messages + self._maps)

    def _row(self, field: FieldDescriptor, rule: Rule) -> Row:
        inner = field.message_type
        kind, least, most, place = "message", 0, 0, 0
        if inner is not None and inner.GetOptions().map_entry:
            place = len(self.places) + len(self._maps)
            fields = inner.fields_by_name
            self._maps.append((True, [self._row(fields["key"], Rule()), self._row(fields["value"], rule)]))
        elif inner is not None:
            place = self.places[inner.name]
        elif field.enum_type is not None:
            kind, most = "enum", sum(1 << number for number in field.enum_type.values_by_number)
        elif field.type == _TYPES.TYPE_DOUBLE:
            kind = "finite" if rule.is_finite else "double"
        elif field.type in (_TYPES.TYPE_STRING, _TYPES.TYPE_BYTES):
            kind, most = "text", 0 if rule.is_json or rule.is_address else rule.max_length
        elif field.type == _TYPES.TYPE_BOOL:
            kind = "bool"
        else:
            kind, least, most = ("int32" if field.type == _TYPES.TYPE_INT32 else "int64"), rule.least, rule.most
        is_listed = is_repeated(field)
        return field.number, kind, is_listed, rule.is_needed, least, most, rule.max_items, place


_RULES = _Rules(list(pb.DESCRIPTOR.message_types_by_name.values()))


def surely_keeps(name: str, data: bytes) -> bool:
    """Return whether the bytes of a message surely keep all rules; if False, use `check`."""
    return _RULES.native.surely_keeps(_RULES.places[name], data)


def check(message: Message) -> None:
    """Raise if a message breaks a rule.

    Raises:
        InvalidMessage: the message breaks a rule.
    """
    name = message.DESCRIPTOR.name
    fault = _CHECKERS[name].fault(message)
    if fault:
        raise InvalidMessage(name + fault)


def parse(message_type: type[M], data: bytes) -> M:
    """Parse a message that keeps all rules.

    Raises:
        InvalidMessage: it breaks a rule, or cannot be parsed.
    """
    try:
        message = message_type.FromString(data)
    except DecodeError as error:
        raise InvalidMessage(f"{len(data)} bytes are no {message_type.__name__}") from error
    if not surely_keeps(message_type.__name__, data):
        check(message)
    return message
