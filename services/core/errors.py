"""The closed set of errors that cross a boundary between processes or end one.

Never a place for errors of one service: a service raises its own and lets one of these out at its edge. Every message
carries what was expected, what was met and the next step, because it is read in a log far from the code.
"""


class MeshError(Exception):
    """Base of the set, for the few places that must name "any of these"."""


class ConfigurationError(MeshError):
    """The deployment is written wrongly; the process exits with `EX_CONFIG` and is not restarted."""


class PeerLostError(MeshError):
    """A peer ended, or its connection did, while something was asked of it; the caller may ask again."""


class DeadlineExceededError(MeshError):
    """An answer did not come within the time that the caller gave."""


class MessageTooLargeError(MeshError):
    """A message is above `limits.MAX_MESSAGE_BYTES`; the request that made it must be refused, not repeated."""


class RequestRefusedError(MeshError):
    """The peer understood the request and refused it; repeating the same bytes cannot help."""


class GenerationEndedError(MeshError):
    """The group's generation is over: the process exits with `EX_GENERATION_ENDED` and is started afresh at once."""


def refusal_text(service: str, error: BaseException) -> bytes:
    """What a process writes to standard error before it leaves with `EX_CONFIG`: each problem on a line of its own."""
    lines = (f"{service}: configuration error: {line}\n" for line in str(error).splitlines())
    return "".join(lines).encode("utf-8", "backslashreplace")
