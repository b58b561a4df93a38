"""This rank's records of what it is about to do, each under the epoch of the log that it follows."""

from services.core.ids import LogIndex
from services.core.log import LogFollower
from services.core.ring import RecordKind
from services.worker.ring import RingWriter


class Records:
    """Into a ring, where there is one."""

    def __init__(self, ring: RingWriter | None, follower: LogFollower) -> None:
        self._ring, self._follower = ring, follower

    def write(self, kind: RecordKind, sequence: LogIndex, *, key: int = 0, payload: int = 0, digest: int = 0) -> None:
        """One record; see RecordKind for what its key and its payload are."""
        if self._ring is not None:
            assert self._follower.epoch is not None, "the log begins with RESET"
            self._ring.write(kind, sequence, self._follower.epoch, key, payload, digest)
