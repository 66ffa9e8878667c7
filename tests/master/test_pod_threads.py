"""The threads of pods: in parallel, one pod's work in order, servers before workers."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

from elasticdl.master.effects import PodThreads
from tests.master.actors import wait_until


class Done:
    """The calls so far, in order."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def note(self, word: str) -> Callable[[], None]:
        return lambda: self.words.append(word)


def test_different_pods_are_created_at_the_same_time() -> None:
    threads, meeting = PodThreads(16), threading.Barrier(16)
    for number in range(16):
        threads.create(f"w-{number}", lambda: meeting.wait(10), is_server=False)  # type: ignore[arg-type,return-value]
    wait_until(lambda: threads.num_done == 16, "all to have met")
    assert not meeting.broken
    threads.close()


def test_the_work_on_one_pod_keeps_its_order() -> None:
    threads, done, pause = PodThreads(16), Done(), threading.Event()
    rng = random.Random(0)
    asked: dict[str, list[str]] = {}
    for number in range(300):
        name = f"ps-{rng.randrange(5)}"
        word = f"{name}/{number}"
        asked.setdefault(name, []).append(word)

        def work(word: str = word, pause_s: float = rng.random() / 1000) -> None:
            pause.wait(pause_s)
            done.note(word)()

        if rng.random() < 0.5:
            threads.create(name, work, is_server=True)
        else:
            threads.delete(name, work)
    threads.close()
    for name, words in asked.items():
        assert [word for word in done.words if word.startswith(f"{name}/")] == words


def test_workers_are_created_after_the_servers_before_them_and_deleted_after_that() -> None:
    threads, done, begin = PodThreads(4), Done(), threading.Event()

    def slow() -> None:
        begin.wait(10)
        done.note("ps-0")()

    threads.create("ps-0", slow, is_server=True)
    threads.create("w-0", done.note("w-0"), is_server=False)
    threads.delete("w-0", done.note("w-0 deleted"))
    threads.create("ps-1", done.note("ps-1"), is_server=True)
    wait_until(lambda: done.words == ["ps-1"], "the other server")
    begin.set()
    wait_until(lambda: len(done.words) == 4, "the rest")
    assert done.words == ["ps-1", "ps-0", "w-0", "w-0 deleted"]
    threads.close()


def test_a_list_is_taken_when_no_creation_is_under_way_or_waits() -> None:
    threads, done, begin = PodThreads(4), Done(), threading.Event()

    def server() -> None:
        begin.wait(10)

    threads.between_creations(done.note("list 1"))
    wait_until(lambda: done.words == ["list 1"], "a list at once")
    threads.create("ps-0", server, is_server=True)
    threads.create("w-0", done.note("w-0"), is_server=False)
    threads.between_creations(lambda: done.note(f"list 2 after {threads.num_done}")())
    threads.delete("ps-9", done.note("ps-9 deleted"))
    wait_until(lambda: done.words == ["list 1", "ps-9 deleted"], "a deletion, which waits for nothing")
    begin.set()
    wait_until(lambda: len(done.words) == 4, "the rest")
    assert done.words[2:] == ["w-0", "list 2 after 2"]
    threads.close()


def test_work_that_raises_still_counts_as_done() -> None:
    threads, done = PodThreads(2), Done()

    def bug() -> None:
        raise ValueError

    threads.create("ps-0", bug, is_server=True)
    threads.create("w-0", done.note("w-0"), is_server=False)
    wait_until(lambda: done.words == ["w-0"] and threads.num_done == 2, "the worker")
    threads.close()
