"""Chat templates: messages into the prompt text a model was trained on, as transformers renders it.

Templates come with the checkpoint and run in a sandbox. Knows nothing about token ids.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from xspec.errors import CheckpointError, RequestError

_PROBE = "xspecprobe"
_RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class _Forms:
    """The forms of message content that a template prints properly."""

    strings: bool
    parts: bool

    def fit(self, content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
        """The same content in a form that it takes, a string where nothing is lost by it."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}] if self.parts and not self.strings else content
        if self.parts and not (self.strings and len(content) == 1):
            return content
        return "\n".join(part["text"] for part in content)


class ChatTemplate:
    """Compiled once; `render` may be called from any thread.

    Some templates read message content as a string, some as a list of parts. Which of them this one
    takes is found out by trying, and content is rewritten into a form that it takes.
    """

    def __init__(
        self, templates: str | Mapping[str, str], special_tokens: Mapping[str, str] | None = None
    ) -> None:
        sources = {"default": templates} if isinstance(templates, str) else dict(templates)
        if "default" not in sources:
            found = ", ".join(sources) or "none"
            raise CheckpointError(f"no chat template is named 'default'; found: {found}")
        self.source = sources["default"]
        self._special = dict(special_tokens or {})
        environment = _environment()
        self._templates = {name: _compile(environment, name, source) for name, source in sources.items()}
        parts = [{"type": "text", "text": _PROBE}]
        self._forms = {
            name: _Forms(strings=self._takes(template, _PROBE), parts=self._takes(template, parts))
            for name, template in self._templates.items()
        }

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        /,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **kwargs: Any,
    ) -> str:
        """The prompt text. `kwargs` are further template variables. RequestError names "messages"."""
        if clash := sorted(_RESERVED & kwargs.keys()):
            raise RequestError(f"{clash[0]} is not a free template variable", param="chat_template_kwargs")
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        forms = self._forms[name]
        chat = [_prepared(message, f"messages[{index}]", forms) for index, message in enumerate(messages)]
        settings = {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._run(self._templates[name], {"messages": chat, **settings, **kwargs})
        except Exception as error:  # a template may raise anything; the messages made it do so
            reason = str(error) or type(error).__name__
            raise RequestError(
                f"the model's chat template refuses these messages: {reason}", param="messages"
            ) from error

    def _run(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        return template.render({**self._special, "documents": None, **variables})

    def _takes(self, template: jinja2.Template, content: Any) -> bool:
        """Whether a user message with this content shows up as its bare text."""
        messages = [{"role": "user", "content": content}]
        try:
            text = self._run(template, {"messages": messages, "tools": None, "add_generation_prompt": True})
        except Exception:  # a template may raise anything for content it does not take
            return False
        printed_whole = f"'text': '{_PROBE}'" in text or f'"text": "{_PROBE}"' in text
        return _PROBE in text and not printed_whole


def _prepared(message: Any, where: str, forms: _Forms) -> dict[str, Any]:
    """A copy of a message with its content in a form the template takes and tool arguments as objects."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} must be an object, found {type(message).__name__}", param="messages")
    ready = {key: value for key, value in message.items() if value is not None}
    if not isinstance(ready.get("role"), str):
        raise RequestError(f"{where}.role must be a string, found {ready.get('role')!r}", param="messages")
    content = ready.get("content")
    if content is None:
        if ready["role"] != "assistant":  # only an answer may consist of something else (tool calls)
            raise RequestError(f"{where}.content is required", param="messages")
        ready["content"] = ""
    else:
        ready["content"] = forms.fit(content if isinstance(content, str) else _text_parts(content, where))
    if "tool_calls" in ready:
        ready["tool_calls"] = _tool_calls(ready["tool_calls"], where)
    return ready


def _text_parts(content: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(content, Sequence) or isinstance(content, (bytes, bytearray)):
        found = type(content).__name__
        raise RequestError(
            f"{where}.content must be a string or a list of parts, found {found}", param="messages"
        )
    parts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise RequestError(
                f"{where}.content[{index}] is of type {kind!r}; this model takes: 'text'", param="messages"
            )
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content[{index}].text must be a string", param="messages")
        parts.append({"type": "text", "text": part["text"]})
    return parts


def _tool_calls(calls: Any, where: str) -> list[Any]:
    """OpenAI sends arguments as a JSON string; templates print them as an object."""
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        found = type(calls).__name__
        raise RequestError(f"{where}.tool_calls must be a list, found {found}", param="messages")
    ready = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise RequestError(
                    f"{where}.tool_calls[{index}].function.arguments is not JSON: {error}", param="messages"
                ) from error
            call = {**call, "function": {**function, "arguments": arguments}}
        ready.append(call)
    return ready


def _compile(environment: jinja2.Environment, name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"the chat template {name!r} does not compile: {error}") from error


def _environment() -> jinja2.Environment:
    """The environment that templates are written for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} marks answers for training; in a prompt it only passes its body through."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of jinja2's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
