"""Why a client's request is not served, as a value: raised anywhere on its way, rendered at the edge (HTTP or gRPC).

Never carries the client's input: a message names the field, what was expected and at most one short number, so that an
error body stays small whatever was sent.
"""

from enum import Enum

MAX_MESSAGE_CHARS = 2048
"""Longest message given to a client; a chat template's own message is the only one that could be longer."""


class Kind(Enum):
    """What a client may do about it; the value is OpenAI's error type."""

    INVALID = "invalid_request_error"
    UNAUTHORIZED = "authentication_error"
    NOT_FOUND = "not_found_error"
    TOO_LARGE = "request_too_large"
    UNSUPPORTED_MEDIA = "unsupported_media_type"
    OVERLOADED = "rate_limit_error"
    UNAVAILABLE = "service_unavailable_error"
    FAILED = "server_error"

    @property
    def http_status(self) -> int:
        """The status line that says the same."""
        return _HTTP_STATUS[self]


_HTTP_STATUS = {
    Kind.INVALID: 400,
    Kind.UNAUTHORIZED: 401,
    Kind.NOT_FOUND: 404,
    Kind.TOO_LARGE: 413,
    Kind.UNSUPPORTED_MEDIA: 415,
    Kind.OVERLOADED: 429,
    Kind.UNAVAILABLE: 503,
    Kind.FAILED: 500,
}


class RefusalError(Exception):
    """A request that ends without an answer.

    `field` is the path of the field at fault (`messages[0].content`), None where no field is. `code` is a stable word
    for programs. `retry_after_s` is set where asking again later can help.
    """

    def __init__(
        self,
        kind: Kind,
        message: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        self.kind = kind
        self.message = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "…"
        self.field = field
        self.code = code
        self.retry_after_s = retry_after_s
        super().__init__(self.message)

    def body(self) -> dict[str, object]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self.kind.value, "param": self.field, "code": self.code}
        return {"error": error}


def invalid(field: str, message: str, code: str | None = None) -> RefusalError:
    """A field with a value that cannot be served; `message` continues "<field> ..."."""
    return RefusalError(Kind.INVALID, f"{field} {message}", field=field, code=code)


def unsupported(field: str, message: str) -> RefusalError:
    """A field whose value would change the answer and is not supported."""
    return RefusalError(Kind.INVALID, f"{field} {message}", field=field, code="unsupported_value")
