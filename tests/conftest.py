"""What all tests share: how hypothesis draws, and that Ctrl-C is heard."""

from __future__ import annotations

import signal

from hypothesis import HealthCheck, settings

SLOW = [HealthCheck.too_slow]
"""Says how busy the machine is, nothing about the code."""

# One run is as good as the next: the same examples each time, and no clock. To look for new
# ones: pytest --hypothesis-profile=search.
settings.register_profile("same", deadline=None, derandomize=True, suppress_health_check=SLOW)
settings.register_profile("search", deadline=None, suppress_health_check=SLOW)
settings.load_profile("same")

# A shell ignores it for what it runs in the background, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
