"""The suite is the same in each run: hypothesis searches from fixed seeds, and a slow machine fails nothing."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

import elasticdl  # noqa: F401  before any test imports gRPC, which it configures
from elasticdl.cluster.local.framework_import import import_less_with_keras
from tests import durations, skips

# The frameworks are a million objects that stay: collections would walk through all of them again and again.
gc.disable()
_GC_THRESHOLD = 50_000  # new objects; Python's own is 700
_processor_s = 0.0  # of this process, when its last report was made

import_less_with_keras()  # as workers do: plots, estimators and data frames are half of the time of the import

settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# Processes share the processors here: a thread of PyTorch that waits for the others of its team must not spin.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell that starts the suite in the background has it ignore SIGINT, and so would the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none, and begin with the longest if other processes run beside."""
    if _is_xdist_worker(config):
        place = durations.longest_first(durations.read())
        items.sort(key=lambda item: place(recorded_name(item)))
    need_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if need_gpu and not has_gpu():
        for item in need_gpu:
            item.add_marker(pytest.mark.skip(reason="there is no GPU"))


def recorded_name(item: pytest.Item) -> str:
    """The name under which a test's duration is recorded."""
    return durations.recorded_name(item.nodeid, item.get_closest_marker("cluster") is not None)


def _is_xdist_worker(config: pytest.Config) -> bool:
    """Whether this is one of the processes of pytest-xdist."""
    return hasattr(config, "workerinput")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Report how a process of pytest-xdist ended in the middle of a test; -9 is often the kernel, out of memory."""
    if error:
        with suppress(subprocess.TimeoutExpired):  # it has closed its pipe, and still runs
            code = node.gateway._io.popen.wait(timeout=10)
            sys.stderr.write(f"\n{node.gateway.id} ended with exit code {code}\n")


def has_gpu() -> bool:
    import torch  # only if there is a test that needs one

    return bool(torch.cuda.is_available())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note in the report of a test's part, which pytest-xdist sends on, what it took of the processors."""
    global _processor_s
    report = yield
    now = durations.processor_seconds()
    vars(report)["processor_s"], _processor_s = now - _processor_s, now
    vars(report)["recorded_name"] = recorded_name(item)
    return report


def pytest_collection_finish() -> None:
    """Later collections skip all objects imported by the test files."""
    global _processor_s
    _processor_s = durations.processor_seconds()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Free the garbage of a file of tests after its last one; later collections skip what stays of it.

    Frameworks keep a million objects of traced functions and modules, and Accelerate collects in each training.
    """
    handled = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return handled


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """A run that must be whole fails if a test was skipped for a reason that is not on the list."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or _is_xdist_worker(session.config):
        return
    if record := os.environ.get(durations.VARIABLE):
        reports = (report for found in reporter.stats.values() for report in found if hasattr(report, "processor_s"))
        durations.write(
            ((report.recorded_name, report.duration, report.processor_s) for report in reports), Path(record)
        )
    found = skips.unlisted(str(report.longrepr[2]) for report in reporter.stats.get("skipped", ()))
    if found and session.exitstatus == pytest.ExitCode.OK:
        reporter.write_line("")
        for reason in found:
            reporter.write_line(f"error: skipped, and not on the list of tests/skips.py: {reason}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
