"""A simulated cluster: virtual time, nodes with capacities and prices, a scheduler with priorities, interruptions.

It owns the places of pods and their cost.  The owner of a pod decides its content and is notified of every change.
Placement follows Kubernetes: pods of a higher priority first, then older ones; a pod without room ends pods of lower
priority on the node where the fewest and smallest of them have to end.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import count

from elasticdl.simulation.scenario import Amounts, NodePool, OtherPods, Scenario

HOUR = 3600.0
_EPSILON = 1e-9  # tolerance of amounts, which are sums of floats


class Timeline:
    """Virtual time with planned events, in order of time; at the same time in the order of planning."""

    def __init__(self) -> None:
        self.now = 0.0
        self._numbers = count()
        self._planned: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, moment: float, action: Callable[[], None]) -> None:
        """Plan an action; a time in the past means now."""
        heapq.heappush(self._planned, (max(moment, self.now), next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def run_until(self, is_over: Callable[[], bool], end: float) -> None:
        """Run events until `is_over`, none is planned, or the end is reached."""
        while self._planned and not is_over() and self._planned[0][0] <= end:
            self.now, _, action = heapq.heappop(self._planned)
            action()


class Change(Enum):
    """The events of a pod."""

    SCHEDULED = auto()
    STARTED = auto()  # its image is pulled, its process begins
    WARNED = auto()  # it is about to end
    CUT_OFF = auto()  # its node is gone, and Kubernetes does not know yet
    ENDED = auto()


@dataclass(eq=False, slots=True)
class SimulatedPod:
    """A pod of the job or of another user.

    Attributes:
        on_change: Called with each change, and with the reason of an end.
        is_billed: Whether it is one of the job's pods.
        may_fail: Whether `Scenario.worker_failures` applies to it.
        is_ending: It was warned and ends soon.
    """

    name: str
    requests: Amounts
    priority: int
    on_change: Callable[[SimulatedPod, Change, str], None]
    is_billed: bool = True
    may_fail: bool = False
    number: int = 0
    node: Node | None = None
    placed_at: float = 0.0
    is_running: bool = False
    is_ending: bool = False
    is_gone: bool = False

    @property
    def shape(self) -> tuple[int, tuple[tuple[str, float], ...]]:
        """Key of placement: pods of the same shape have room in the same places."""
        return (self.priority, tuple(sorted(self.requests.items())))


@dataclass(eq=False, slots=True)
class Node:
    """A node; `image_at`: when it has the job's image, None until a pod is placed on it."""

    name: str
    pool: NodePool
    number: int
    free: dict[str, float]
    pods: dict[int, SimulatedPod] = field(default_factory=dict)
    is_up: bool = True
    image_at: float | None = None

    def fits(self, requests: Amounts) -> bool:
        free = self.free
        return self.is_up and all(free.get(name, 0.0) + _EPSILON >= amount for name, amount in requests.items())

    def share(self, requests: Amounts) -> float:
        """Return the largest share of a resource of the node that a pod takes."""
        capacity = self.pool.resources
        return max((amount / capacity[name] for name, amount in requests.items() if capacity.get(name)), default=0.0)


class SimulatedCluster:
    """Nodes and pods of a cluster.

    Args:
        grace: Seconds between the warning of a pod that has to make room and its end.
    """

    def __init__(self, scenario: Scenario, timeline: Timeline, seed: int, grace: float = 2.0) -> None:
        self._scenario = scenario
        self._timeline = timeline
        self._seed = seed
        self._grace = grace
        self._numbers = count(1)
        self.nodes: list[Node] = []
        for pool in scenario.nodes:
            for k in range(pool.count):
                self.nodes.append(Node(f"{pool.name}-{k}", pool, len(self.nodes), dict(pool.resources)))
        self._pending: dict[object, dict[int, SimulatedPod]] = {}  # by shape
        self._candidates: dict[object, list[int]] = {}  # by shape: nodes that may have room, a heap
        self._is_due = False
        self.on_room: list[Callable[[], None]] = []  # called when there may be more room
        self.cost = 0.0  # of ended pods of the job
        for node in self.nodes:
            if node.pool.interruptions:
                self._plan_interruptions(node, random.Random(f"{seed}/{node.name}"))
        for number, others in enumerate(scenario.pods):
            self._plan_others(number, others)
        self._may_fail: dict[int, SimulatedPod] = {}
        if scenario.worker_failures:
            self._plan_failure(random.Random(f"{seed}/failures"))

    # Pods -----------------------------------------------------------------------------------------------------------

    def create(self, pod: SimulatedPod) -> None:
        """Create a pod; it is placed as soon as there is room."""
        pod.number = next(self._numbers)
        self._pending.setdefault(pod.shape, {})[pod.number] = pod
        self._look_soon()

    def create_all(self, pods: list[SimulatedPod]) -> bool:
        """Place all of these pods now, or none of them; return whether they are placed."""
        placed: list[SimulatedPod] = []
        for pod in pods:
            pod.number = next(self._numbers)
            node = self._node_for(pod)
            if node is None:
                for one in placed:
                    self._give_up_place(one)
                self._make_room(pod)
                return False
            self._put(pod, node)
            placed.append(pod)
        for pod in placed:
            self._begin(pod)
        return True

    def end(self, pod: SimulatedPod, reason: str) -> None:
        """End a pod; without effect on an ended one."""
        if pod.is_gone:
            return
        pod.is_gone, pod.is_running = True, False
        self._may_fail.pop(pod.number, None)
        if pod.node is None:
            self._pending.get(pod.shape, {}).pop(pod.number, None)
        else:
            self.cost += self._cost_of(pod)
            self._give_up_place(pod)
            self._look_soon()
        pod.on_change(pod, Change.ENDED, reason)

    def could_ever_hold(self, groups: Iterable[tuple[Amounts, int]]) -> bool:
        """Return whether the empty cluster has room for these numbers of pods of each kind at once."""
        room = [Node(node.name, node.pool, node.number, dict(node.pool.resources)) for node in self.nodes]
        for requests, number in groups:
            left = number
            for node in room:
                while left and node.fits(requests):
                    _subtract(node.free, requests, 1.0)
                    left -= 1
            if left:
                return False
        return True

    def total_cost(self) -> float:
        """Return the cost of the job's pods until now, in the unit of the prices."""
        running = (pod for node in self.nodes for pod in node.pods.values())
        return self.cost + sum(self._cost_of(pod) for pod in running)

    def _cost_of(self, pod: SimulatedPod) -> float:
        if pod.node is None or not pod.is_billed:
            return 0.0
        seconds = self._timeline.now - pod.placed_at
        return seconds / HOUR * pod.node.pool.price * pod.node.share(pod.requests)

    # Placement ------------------------------------------------------------------------------------------------------

    def _look_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            self._timeline.after(0.0, self._place_pending)

    def _place_pending(self) -> None:
        """Place pending pods as far as there is room."""
        self._is_due = False
        shapes = [shape for shape, pods in self._pending.items() if pods]
        for shape in sorted(shapes, key=lambda one: (-one[0], next(iter(self._pending[one])))):  # type: ignore[index]
            pods = self._pending[shape]
            while pods:
                pod = next(iter(pods.values()))
                node = self._node_for(pod)
                if node is None:
                    self._make_room(pod)
                    break
                del pods[pod.number]
                self._put(pod, node)
                self._begin(pod)
        for action in self.on_room:
            action()

    def _node_for(self, pod: SimulatedPod) -> Node | None:
        """Return the first node with room; None if there is none."""
        heap = self._candidates.get(pod.shape)
        if heap is None:
            heap = self._candidates[pod.shape] = list(range(len(self.nodes)))
        while heap:
            node = self.nodes[heap[0]]
            if node.fits(pod.requests):
                return node
            heapq.heappop(heap)
        return None

    def _put(self, pod: SimulatedPod, node: Node) -> None:
        pod.node, pod.placed_at = node, self._timeline.now
        node.pods[pod.number] = pod
        _subtract(node.free, pod.requests, 1.0)
        assert min(node.free.values()) > -_EPSILON, f"{node.name} holds more than fits"

    def _begin(self, pod: SimulatedPod) -> None:
        node, now = pod.node, self._timeline.now
        assert node is not None
        pod.on_change(pod, Change.SCHEDULED, "")
        if node.image_at is None:
            node.image_at = now + self._scenario.image_pull
        self._timeline.at(node.image_at, lambda: self._start(pod, node))

    def _start(self, pod: SimulatedPod, node: Node) -> None:
        if not pod.is_gone and pod.node is node and node.is_up:
            pod.is_running = True
            if pod.may_fail:
                self._may_fail[pod.number] = pod
            pod.on_change(pod, Change.STARTED, "")

    def _give_up_place(self, pod: SimulatedPod) -> None:
        node = pod.node
        assert node is not None
        pod.node = None
        del node.pods[pod.number]
        _subtract(node.free, pod.requests, -1.0)
        for heap in self._candidates.values():
            heapq.heappush(heap, node.number)

    def _make_room(self, pod: SimulatedPod) -> None:
        """End pods of lower priority on the node where that costs least, unless some are ending already."""
        best: tuple[int, int, int] | None = None
        chosen: list[SimulatedPod] = []
        for node in self.nodes:
            lower = [one for one in node.pods.values() if one.priority < pod.priority]
            if not node.is_up or not lower:
                continue
            victims = _victims(node, sorted(lower, key=lambda one: (one.priority, -one.number)), pod.requests)
            if not victims:
                continue
            if any(one.is_ending for one in victims):
                return
            worth = (max(one.priority for one in victims), len(victims), node.number)
            if best is None or worth < best:
                best, chosen = worth, victims
        for victim in chosen:
            self.warn(victim, "Preempted", self._grace)

    def warn(self, pod: SimulatedPod, reason: str, seconds: float) -> None:
        """Warn a pod and end it after `seconds`."""
        pod.is_ending = True
        self._timeline.after(seconds, lambda: self.end(pod, reason))
        pod.on_change(pod, Change.WARNED, reason)

    # Events of the cluster ------------------------------------------------------------------------------------------

    def _plan_interruptions(self, node: Node, rng: random.Random) -> None:
        gap = rng.expovariate(node.pool.interruptions / HOUR)
        self._timeline.after(gap, lambda: self._interrupt(node, rng))

    def _interrupt(self, node: Node, rng: random.Random) -> None:
        if node.pool.notice:
            for pod in list(node.pods.values()):
                if not pod.is_ending:
                    self.warn(pod, "Evicted", node.pool.notice)
        self._timeline.after(node.pool.notice, lambda: self._take_back(node, rng))

    def _take_back(self, node: Node, rng: random.Random) -> None:
        node.is_up, node.image_at = False, None
        for pod in list(node.pods.values()):
            pod.is_running = False
            self._may_fail.pop(pod.number, None)
            if pod.is_ending:
                self.end(pod, "Evicted")
                continue
            pod.on_change(pod, Change.CUT_OFF, "")
            self._timeline.after(self._scenario.node_lost, lambda pod=pod: self.end(pod, "NodeLost"))  # type: ignore[misc]
        self._timeline.after(node.pool.away, lambda: self._give_back(node, rng))

    def _give_back(self, node: Node, rng: random.Random) -> None:
        for pod in list(node.pods.values()):
            self.end(pod, "NodeLost")
        node.is_up = True
        for heap in self._candidates.values():
            heapq.heappush(heap, node.number)
        self._look_soon()
        self._plan_interruptions(node, rng)

    def _plan_failure(self, rng: random.Random) -> None:
        self._timeline.after(rng.expovariate(self._scenario.worker_failures / HOUR), lambda: self._fail_one(rng))

    def _fail_one(self, rng: random.Random) -> None:
        if self._may_fail:
            self.end(rng.choice(list(self._may_fail.values())), "Killed")
        self._plan_failure(rng)

    def _plan_others(self, number: int, others: OtherPods) -> None:
        def changed(pod: SimulatedPod, change: Change, reason: str) -> None:
            if change is Change.STARTED:
                self._timeline.after(others.lasts, lambda: self.end(pod, "Completed"))

        def create() -> None:
            for k in range(others.count):
                name = f"other-{number}-{k}"
                self.create(SimulatedPod(name, others.resources, others.priority, changed, is_billed=False))

        self._timeline.at(others.at, create)

    def check(self) -> None:
        """Check that the pods of each node fit on it.

        Raises:
            AssertionError: A node has more pods than fit.
        """
        for node in self.nodes:
            for name, capacity in node.pool.resources.items():
                used = sum(pod.requests.get(name, 0.0) for pod in node.pods.values())
                assert used <= capacity + 1e-6, (node.name, name, used)


def _victims(node: Node, lower: list[SimulatedPod], requests: Amounts) -> list[SimulatedPod]:
    """Return the first pods whose end makes enough room; empty if not even the end of all does."""
    free = dict(node.free)
    for k, one in enumerate(lower):
        _subtract(free, one.requests, -1.0)
        if all(free.get(name, 0.0) + _EPSILON >= amount for name, amount in requests.items()):
            return lower[: k + 1]
    return []


def _subtract(free: dict[str, float], requests: Amounts, times: float) -> None:
    for name, amount in requests.items():
        free[name] = free.get(name, 0.0) - times * amount
