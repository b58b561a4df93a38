"""Bounds that both ends of a connection, or a process and its supervisor, must agree on.

Not settings: changing one on one side only breaks the pair, so each stands here once with its reason.
"""

EX_CONFIG = 78
"""Exit code of a configuration error: the supervisor does not restart, the message is already printed (sysexits.h)."""

EX_GENERATION_ENDED = 75
"""Exit code of a worker whose generation ended through no fault of its own (EX_TEMPFAIL): restarted at once."""

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Largest gRPC message, either way: 1.2 M token ids are 6 MB, 20 logprobs of each of 100 k tokens are 30 MB."""

KEEPALIVE_TIME_MS = 30_000
"""How often an idle connection is probed. The server must allow it, or it drops the link for "too many pings"."""

KEEPALIVE_TIMEOUT_MS = 10_000
"""How long a probe may stay unanswered before the connection counts as lost."""

MIN_PING_INTERVAL_MS = 10_000
"""What the server tolerates: under `KEEPALIVE_TIME_MS`, so that no clock skew turns probes into strikes."""

RECONNECT_BACKOFF_MIN_MS = 100
RECONNECT_BACKOFF_MAX_MS = 2_000
"""How fast a channel looks for a peer that restarts: soon after the loss, then seldom enough to cost nothing."""

SHUTDOWN_GRACE_S = 3.6
"""From the first signal, how long a service may take to finish by itself; then its `main` is cancelled."""

SHUTDOWN_HARD_S = 4.2
"""From the first signal, when a service ends itself whatever still runs, a blocked event loop included."""

SHUTDOWN_KILL_S = 4.5
"""From the first signal, when the supervisor kills what is left: honcho kills the supervisor itself at 5 s."""

MAX_UNIX_PATH_BYTES = 107
"""What `sockaddr_un` holds, less the final zero."""

BOTH_ENDS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_TIME_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""What a channel and its server must agree on, or the one cuts the other off."""
