"""The suite is the same in each run: hypothesis searches from fixed seeds, and a slow machine fails nothing."""

import signal

from hypothesis import HealthCheck, settings

import elasticdl  # noqa: F401  before any test imports gRPC, which it configures

settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")

# A shell that starts the suite in the background has it ignore SIGINT, and so would the programs under test.
signal.signal(signal.SIGINT, signal.default_int_handler)
