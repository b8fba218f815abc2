"""Chat messages of a request body, reduced to what a text chat template reads.

Content parts become one string; everything that is not text is refused by the path of its field.
"""

from __future__ import annotations

from typing import Any

from xspec.errors import RequestError
from xspec.server.fields import Fields, refuse, shown

ROLES = ("system", "developer", "user", "assistant")


def read_messages(fields: Fields) -> tuple[dict[str, str], ...]:
    value = fields.raw("messages")
    if type(value) is not list or not value:
        raise refuse("messages", value, "a list of at least one message")
    return tuple(_message(f"messages[{index}]", message) for index, message in enumerate(value))


def _message(path: str, message: Any) -> dict[str, str]:
    if type(message) is not dict:
        raise refuse(path, message, "an object with role and content")
    role = message.get("role")
    if role in ("tool", "function"):
        raise RequestError(f"{path}.role {role!r} is not supported: tool calling is not available.",
                           param=f"{path}.role")  # fmt: skip
    if type(role) is not str or role not in ROLES:
        raise refuse(f"{path}.role", role, f"one of {', '.join(ROLES)}")
    for name in ("tool_calls", "function_call", "audio", "refusal"):
        if message.get(name):
            raise RequestError(f"{path}.{name} is not supported.", param=f"{path}.{name}")
    read = {
        # Templates know the older name of the same role.
        "role": "system" if role == "developer" else role,
        "content": _content(f"{path}.content", message.get("content"), optional=role == "assistant"),
    }
    for name in ("name", "reasoning_content"):
        extra = message.get(name)
        if extra is not None:
            if type(extra) is not str:
                raise refuse(f"{path}.{name}", extra, "a string")
            read[name] = extra
    return read


def _content(path: str, content: Any, *, optional: bool) -> str:
    if content is None and optional:
        return ""
    if type(content) is str:
        return content
    if type(content) is not list or not content:
        raise refuse(path, content, "a string or a list of text parts")
    return "\n".join(_part(f"{path}[{index}]", part) for index, part in enumerate(content))


def _part(path: str, part: Any) -> str:
    if type(part) is not dict:
        raise refuse(path, part, "an object of type 'text'")
    kind = part.get("type")
    if kind != "text":
        raise RequestError(
            f"{path}.type must be 'text'; this model reads no other content, found {shown(kind)}.",
            param=f"{path}.type",
        )
    text = part.get("text")
    if type(text) is not str:
        raise refuse(f"{path}.text", text, "a string")
    return text
