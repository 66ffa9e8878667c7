"""Story: what has led from one world to the next, for the log.  It decides nothing."""

from __future__ import annotations

from elasticdl.master.core.values import WorkerGroup

_MAX_COMPLAINT = 160  # characters of what a member has met; its own log has the whole


class TransitionLog:
    """The change under way: since when, and why.

    The master's own knowledge counts; a member's report of its collective is used only if nothing else is known.
    """

    def __init__(self) -> None:
        self._facts: list[str] = []
        self._complaints: list[str] = []
        self._since: float | None = None

    @property
    def since(self) -> float | None:
        """When the change under way began; None: there is none."""
        return self._since

    def begin(self, clock: float) -> None:
        """A world is broken or a new one is called; only the first of these since the last one formed counts."""
        self._since = clock if self._since is None else self._since

    def fact(self, text: str) -> None:
        if text not in self._facts:
            self._facts.append(text)

    def complaint(self, text: str) -> None:
        """A member has left its world, with these words."""
        first = text.split(". ")[0].strip()
        self._complaints.append(first if len(first) <= _MAX_COMPLAINT else first[: _MAX_COMPLAINT - 1] + "…")

    def end(self, world: WorkerGroup, number: int, clock: float, origin: str) -> str:
        """The line of a world that has formed; the next change begins anew.

        Args:
            world: the one that has formed.
            number: how many have, with this one.
            clock: now.
            origin: of a model that is not that of a member of the last world; else empty.
        """
        duration = 0.0 if self._since is None else clock - self._since
        names = ", ".join(str(member.worker_id) for member in world.members)
        count = f"{len(world.members)} worker{'s' if len(world.members) > 1 else ''}"
        line = f"World {number} of {count} has formed in {duration:.2f} s: worker {names}"
        causes = self._facts or self._complaints[:1]
        if origin and number > 1:
            causes = [*causes, "no worker has the model any more"]
        line += f" ({'; '.join(causes)})" if causes else ""
        self._facts, self._complaints, self._since = [], [], None
        return line + (f"; its model is {origin}" if origin else "")
