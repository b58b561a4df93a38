"""The words every carrier shares: what collectives are for, how they fail and the one error that says so.

Closed sets, equal to those of native/collectives.h by test. Never imports torch.
"""

from __future__ import annotations

from enum import IntEnum


class Purpose(IntEnum):
    """What the caller runs a collective for; ranks that disagree about it are stopped by name."""

    TEST = 1
    BOOT = 2
    EMBEDDING = 3
    ATTENTION_OUTPUT = 4
    FFN_OUTPUT = 5
    LOGITS = 6
    HIDDEN_STATES = 7
    TOKENS = 8
    FLIP = 9
    ATTENTION_INPUT = 10
    ATTENTION_PARTS = 11


class Status(IntEnum):
    """Every way an operation can fail, for every carrier."""

    DATA_TIMEOUT = 1
    ACK_TIMEOUT = 2
    ABORTED = 3
    AHEAD = 4
    MISMATCH = 5
    OVERWRITTEN = 6
    LOST = 7  # a connection broke: only carriers that have connections


class Wait(IntEnum):
    """What was waited for, or compared, when an operation failed."""

    NOTHING = 0
    DATA_FLAG = 1
    ACKNOWLEDGEMENT = 2
    MESSAGE = 3
    CREDIT = 4
    BOARD_ENTRY = 5
    SAME_OPERATION = 6
    SAME_PURPOSE = 7
    SAME_BYTES = 8
    SAME_TAG = 9
    SAME_ORDINAL = 10


class Operation(IntEnum):
    """What a rank is in, as its mirror line says it."""

    NONE = 0
    ALL_REDUCE = 1
    ALL_GATHER = 2
    BROADCAST = 3
    BARRIER = 4
    SEND = 5
    RECV = 6
    PUBLISH = 7
    READ = 8
    ALL_TO_ALL = 9


class AbortReason(IntEnum):
    """Why a group was told to let go; the first reason stays."""

    SHUTDOWN = 1
    PEER_LOST = 2
    STEP_FAILED = 3
    WEDGED = 4
    OPERATOR = 5


class CollectiveError(Exception):
    """A collective failed, and with it the generation: which wait, which peer, the round expected and the one seen."""

    def __init__(
        self,
        status: Status,
        *,
        operation: Operation,
        purpose: Purpose,
        rank: int,
        peer: int,
        deadline_s: float,
        wait: Wait = Wait.NOTHING,
        waited: int = 0,
        seen: int = 0,
        cause: str = "",
    ) -> None:
        self.status = status
        self.operation = operation
        self.purpose = purpose
        self.rank = rank
        self.peer = peer
        self.deadline_s = deadline_s
        self.wait = wait
        self.waited = waited
        self.seen = seen
        what = wait.name.lower().replace("_", " ")
        super().__init__(
            f"{operation.name} for {purpose.name} on rank {rank}: {status.name} ({what} of rank {peer}): "
            f"{waited} expected, {seen} seen, deadline {deadline_s:g} s{cause and ': ' + cause}; "
            f"read the ring of rank {peer}, then end the generation"
        )
