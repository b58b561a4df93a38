"""The messages of a chat request: roles and content, reduced to what a chat template takes. Pure.

Never keeps a part that is not text: a picture that the model cannot see must be refused, not dropped.
"""

from collections.abc import Mapping

from services.router.openai.fields import Fields, sequence, shown
from services.router.openai.refusal import RefusalError, invalid, unsupported

MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Content parts of one message."""
_ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
_CARRIED = ("name", "tool_calls", "tool_call_id")
"""Keys that templates know besides role and content; they go through as they are."""


def read_messages(fields: Fields) -> tuple[dict[str, object], ...]:
    """The messages in order, each with a role and a content that is text.

    Raises:
        RefusalError: none there, or the first one at fault.
    """
    value = fields.value("messages")
    if value is None:
        raise invalid("messages", "is required: a list of messages")
    entries = sequence(value, "messages", MAX_MESSAGES)
    if not entries:
        raise invalid("messages", "must not be empty")
    return tuple(_message(entry, f"messages[{place}]") for place, entry in enumerate(entries))


def _message(entry: object, path: str) -> dict[str, object]:
    if not isinstance(entry, dict):
        raise invalid(path, f"must be an object with role and content, got {shown(entry)}")
    role = entry.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise invalid(f"{path}.role", f"must be one of {', '.join(_ROLES)}")
    message: dict[str, object] = {"role": _ROLES[role], "content": _content(entry, path)}
    message.update((key, entry[key]) for key in _CARRIED if entry.get(key) is not None)
    return message


def _content(entry: Mapping[str, object], path: str) -> str:
    content = entry.get("content")
    where = f"{path}.content"
    if isinstance(content, list):
        parts = sequence(content, where, MAX_PARTS)
        return "".join(_part(part, f"{where}[{place}]") for place, part in enumerate(parts))
    if content is None and entry.get("role") == "assistant" and entry.get("tool_calls"):
        return ""
    if not isinstance(content, str):
        raise invalid(where, f"must be a string or a list of parts, got {shown(content)}")
    return _unicode(content, where)


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise invalid(path, f"must be an object, got {shown(part)}")
    if part.get("type") != "text":
        raise _not_text(path)
    text = part.get("text")
    if not isinstance(text, str):
        raise invalid(f"{path}.text", f"must be a string, got {shown(text)}")
    return _unicode(text, f"{path}.text")


def _not_text(path: str) -> RefusalError:
    return unsupported(path, "must be a part of type text: this model reads text only")


def _unicode(text: str, path: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise invalid(path, "has half of a surrogate pair and is not valid Unicode") from None
    return text
