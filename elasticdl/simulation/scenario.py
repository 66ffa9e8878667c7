"""Scenario: the cluster of a simulation, read from YAML: nodes, other pods, priorities, failures, delays.

It owns the keys of the file and their checks.  Times are seconds from the start of the simulation, prices are per hour.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml

from elasticdl_client.errors import FlagError
from elasticdl_client.kubernetes.resources import parse_resources, quantity

T = TypeVar("T")
Amounts = Mapping[str, float]
"""Cores, bytes or pieces by resource."""

_DURATION = re.compile(r"(?:(\d+)h)?(?:(\d+)m)?(?:(\d+(?:\.\d+)?)s)?")
_MOST_NODES = 100_000


def amounts(text: str) -> Amounts:
    """Read a resource string, such as cpu=4,memory=16Gi,gpu=1.

    Raises:
        FlagError: The text is invalid.
    """
    return {name: float(quantity(value)) for name, value in parse_resources(text).items()}


def _resources(value: object) -> Amounts:
    if not isinstance(value, str) or not value:
        raise ValueError("is a text such as cpu=4,memory=16Gi,gpu=1")
    try:
        return amounts(value)
    except FlagError as error:
        raise ValueError(f"is no text of resources: {error.what}") from error


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError("is a number that is not negative")
    return float(value)


def _speed(value: object) -> float:
    if (speed := _number(value)) <= 0:
        raise ValueError("is a number above 0")
    return speed


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST_NODES:
        raise ValueError(f"is a whole number from 1 to {_MOST_NODES:,}")
    return value


def _priority(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError("is a whole number")
    return value


def _name(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", value):
        raise ValueError("is a name of lower-case letters, digits and dashes")
    return value


def _seconds(value: object) -> float:
    if isinstance(value, str) and value and (found := _DURATION.fullmatch(value)):
        hours, minutes, seconds = (float(part or 0) for part in found.groups())
        return 3600 * hours + 60 * minutes + seconds
    try:
        return _number(value)
    except ValueError:
        raise ValueError("is a time such as 90, 90s, 5m or 1h30m") from None


def _key(read: Callable[[object], Any], default: Any = dataclasses.MISSING) -> Any:
    return dataclasses.field(default=default, metadata={"read": read})


def _list_of(kind: type) -> Any:
    return dataclasses.field(default=(), metadata={"list": kind})


@dataclass(frozen=True, slots=True)
class NodePool:
    """Nodes of one kind.

    Attributes:
        resources: Resources that one of them offers to pods.
        price: Price of one of them per hour.
        speed: Speed of a worker on it, relative to the speed at which the seconds of a step were measured.
        interruptions: Mean number of interruptions per node and hour: spot instances are taken back.
        notice: Seconds between the announcement of an interruption and the end of the pods; 0 means no announcement.
        away: Seconds until a new node replaces an interrupted one.
    """

    name: str = _key(_name)
    resources: Amounts = _key(_resources)  # noqa: RUF009  a dataclass field
    count: int = _key(_count, 1)
    price: float = _key(_number, 0.0)
    speed: float = _key(_speed, 1.0)
    interruptions: float = _key(_number, 0.0)
    notice: float = _key(_seconds, 0.0)
    away: float = _key(_seconds, 300.0)


@dataclass(frozen=True, slots=True)
class OtherPods:
    """Pods of other users.

    Attributes:
        at: When they are created.
        lasts: How long each of them runs.
    """

    at: float = _key(_seconds)
    lasts: float = _key(_seconds)
    resources: Amounts = _key(_resources)  # noqa: RUF009  a dataclass field
    count: int = _key(_count, 1)
    priority: int = _key(_priority, 0)


@dataclass(frozen=True, slots=True)
class ApiOutage:
    """An outage of the Kubernetes API: no pod is created, and no change is reported."""

    at: float = _key(_seconds)
    lasts: float = _key(_seconds)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, and its events over time.

    Attributes:
        priorities: Value of each PriorityClass, by its name; a pod without one has 0.
        image_pull: Seconds that a node takes to pull the job's image, once.
        start: Seconds from the start of a worker's or a server's container to its first call of the master.
        node_lost: Seconds after which Kubernetes gives up a node that is gone without notice.
        api_latency: Seconds between a change of a pod and the master's knowledge of it, and the other way round.
        worker_failures: Mean number of killed worker processes of the whole job per hour.
        steps_per_server: Minibatches per second that each parameter server can serve; 0 means no limit.
    """

    nodes: tuple[NodePool, ...] = _list_of(NodePool)
    pods: tuple[OtherPods, ...] = _list_of(OtherPods)
    priorities: Mapping[str, int] = dataclasses.field(default_factory=dict, metadata={"map": _priority})
    image_pull: float = _key(_seconds, 30.0)
    start: float = _key(_seconds, 15.0)
    node_lost: float = _key(_seconds, 50.0)
    api_latency: float = _key(_seconds, 0.1)
    api_outages: tuple[ApiOutage, ...] = _list_of(ApiOutage)
    worker_failures: float = _key(_number, 0.0)
    steps_per_server: float = _key(_number, 0.0)


def read_scenario(path: str) -> Scenario:
    """Read a file.

    Raises:
        FlagError: The file cannot be read or is invalid; the message names the line.
    """
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise FlagError(f"{path} cannot be read: {error}.", "Give the path of a YAML file to --cluster.") from error
    return scenario_of(text, path)


def scenario_of(text: str, path: str) -> Scenario:
    """Read YAML; `path` is for messages.

    Raises:
        FlagError: The text is invalid; the message names the line.
    """
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise FlagError(f"{path}:{line}: this is not YAML: {error.problem}.", "") from error
    except yaml.YAMLError as error:
        raise FlagError(f"{path} is not YAML: {error}.", "") from error
    if root is None:
        raise FlagError(f"{path} is empty.", f"Its keys are {_keys_of(Scenario)}; `nodes` is needed.")
    scenario = _Reader(path).read(Scenario, root, "the file")
    names = [pool.name for pool in scenario.nodes]
    if not names:
        raise FlagError(f"{path} has no nodes.", "Give at least one: nodes: [{name: small, resources: cpu=4}].")
    if len(set(names)) < len(names):
        raise FlagError(f"{path}: two entries of nodes have the same name.", "Give each its own name.")
    return scenario


def _keys_of(kind: type) -> str:
    return ", ".join(field.name for field in dataclasses.fields(kind))


class _Reader:
    """Makes records of the nodes of a YAML document."""

    def __init__(self, path: str) -> None:
        self._path = path

    def read(self, kind: type[T], node: yaml.Node, where: str) -> T:
        fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        allowed = f"The keys of {where} are {', '.join(fields)}."
        values: dict[str, Any] = {}
        for key, value in self._pairs(node, where, allowed):
            name = key.value
            if name not in fields:
                self._fail(key, f"{where} has no key {name!r}", allowed)
            if name in values:
                self._fail(key, f"{name} is given twice", "Give it once.")
            values[name] = self._value(fields[name], value, name)
        missing = [
            name
            for name, field in fields.items()
            if field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
            and name not in values
        ]
        if missing:
            self._fail(node, f"{where} lacks {', '.join(missing)}", allowed)
        return kind(**values)

    def _value(self, field: dataclasses.Field[Any], node: yaml.Node, name: str) -> Any:
        if (kind := field.metadata.get("list")) is not None:
            if not isinstance(node, yaml.SequenceNode):
                self._fail(node, f"{name} is a list", f"Each entry has keys of {_keys_of(kind)}.")
            return tuple(self.read(kind, one, f"an entry of {name}") for one in node.value)
        if (read := field.metadata.get("map")) is not None:
            return {str(k.value): self._plain(read, v, k.value) for k, v in self._pairs(node, name, "Write name: 1.")}
        return self._plain(field.metadata["read"], node, name)

    def _plain(self, read: Callable[[object], Any], node: yaml.Node, name: str) -> Any:
        value = None
        try:
            if isinstance(node, yaml.ScalarNode):  # 1:30 is 90 in YAML 1.1
                value = node.value if ":" in node.value else yaml.SafeLoader("").construct_object(node, deep=True)
            return read(value)
        except yaml.constructor.ConstructorError as error:
            self._fail(node, f"{name}: {error.problem}", "Leave the tag out.")
        except ValueError as error:
            given = node.value if isinstance(node, yaml.ScalarNode) else "a list or mapping"
            self._fail(node, f"{name} {error}, not {given!r}", "Correct the value.")

    def _pairs(self, node: yaml.Node, where: str, hint: str) -> list[tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            self._fail(node, f"{where} is a mapping of keys to values", hint)
        pairs: list[tuple[yaml.Node, yaml.Node]] = node.value
        return pairs

    def _fail(self, node: yaml.Node, what: str, hint: str) -> NoReturn:
        raise FlagError(f"{self._path}:{node.start_mark.line + 1}: {what}.", hint)
