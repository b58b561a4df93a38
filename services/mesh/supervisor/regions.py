"""Memory that all ranks of a group share: anonymous files, held by their supervisor and inherited by descriptor.

Nothing has a name, so nothing is left behind. Sizes are the ranks' own matter: each region begins empty.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

KEPT_REGIONS = ("weights",)
"""Live as long as the supervisor: a rank that crashed finds the weights where they were."""

FRESH_REGIONS = ("pool", "flags")
"""New and zero-filled for every start of the group: nothing of a dead generation is ever read."""


class Regions:
    """The regions of one group."""

    def __init__(self) -> None:
        self._fds = {name: _make(name) for name in KEPT_REGIONS}

    def renew(self) -> Mapping[str, int]:
        """Replaces the fresh regions, to be called with no rank alive; returns every descriptor by name."""
        for name in FRESH_REGIONS:
            if name in self._fds:
                os.close(self._fds.pop(name))
            self._fds[name] = _make(name)
        return self._fds


def _make(name: str) -> int:
    return os.memfd_create(f"flipmesh-{name}", os.MFD_CLOEXEC)
