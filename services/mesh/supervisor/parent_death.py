"""Ends a process with its parent, whatever ends the parent.

The kernel's parent-death signal covers everything from the call on; what died before the call is seen by comparing the
parent with the one expected. Never starts or signals anything itself.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def tie_to_parent(expected_parent: int | None) -> None:
    """Asks the kernel to kill this process when its parent dies, and exits at once if that has happened.

    `expected_parent` is the pid of who started this process; None: whoever is the parent now. The signal is SIGKILL,
    because a process that hangs in native code would outlive any other.
    """
    expected = os.getppid() if expected_parent is None else expected_parent
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed: this process could outlive its parent")
    if os.getppid() != expected:
        sys.exit(f"the parent (process {expected}) ended while this process was starting")
