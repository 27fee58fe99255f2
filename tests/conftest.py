"""Hypothesis profiles and what every test may ask for."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# No deadlines: the machines that run this are shared, and speed is `bench/`'s business.
_QUIET = [HealthCheck.too_slow]
settings.register_profile("dev", max_examples=40, deadline=None, suppress_health_check=_QUIET)
settings.register_profile(
    "ci", max_examples=60, deadline=None, suppress_health_check=_QUIET, derandomize=True, print_blob=True
)
settings.register_profile("nightly", max_examples=2000, deadline=None, suppress_health_check=_QUIET)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
