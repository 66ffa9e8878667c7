"""The suite is the same in each run: hypothesis searches from fixed seeds, and a slow machine fails nothing."""

from hypothesis import HealthCheck, settings

settings.register_profile("house", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("house")
