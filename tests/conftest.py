"""Every test runs on the CPU, and property tests draw the same examples each time: a red run can be run again."""

import os

from hypothesis import settings

os.environ.setdefault("JAX_PLATFORMS", "cpu")
settings.register_profile("repeatable", derandomize=True)
settings.load_profile("repeatable")
