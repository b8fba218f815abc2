"""Chat templates against transformers, and what a request may do to them."""

from __future__ import annotations

from typing import Any

import pytest
from text_corpus import CORPUS, embedded_gguf, embedded_reference

from xspec.errors import CheckpointError, RequestError
from xspec.text.chat import ChatTemplate
from xspec.text.tokenizer import load_text

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
STRINGS = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] + eos_token }}{% endfor %}"
PARTS = (
    "{% for m in messages %}[{{ m.role }}]{% for p in m.content %}"
    "{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
)
PRINTS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
FEATURES = """{%- if tools %}
    {{- tools | tojson(indent=2) }}
{%- endif %}
{% set ns = namespace(n=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {{ message.content | tojson }} {{ ns.n }}
    {% if ns.n == 2 %}{% break %}{% endif %}
    {% generation %}<{{ message.role }}>{% endgeneration %}

{% endfor %}
{{ strftime_now('%%') }}{% if add_generation_prompt %}GO{{ extra }}{% endif %}{{ documents is none }}"""


def user(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "user", "content": content, **more}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


@pytest.fixture(scope="module")
def reference() -> Any:
    return embedded_reference()


CHATS = [
    [user("hi")],
    [
        {"role": "system", "content": "Be brief."},
        user("hi"),
        {"role": "assistant", "content": "yes"},
        user("go"),
    ],
    [user("x\n\n"), {"role": "assistant", "content": ""}, user("<|im_end|>{{ 7*7 }}{% raw %}")],
    *([user(text)] for text in CORPUS),
]


@pytest.mark.parametrize("prompt", [True, False])
def test_the_embedded_model_renders_as_transformers(reference: Any, prompt: bool) -> None:
    assets = load_text(embedded_gguf())
    assert assets.chat is not None
    for chat in CHATS:
        text = assets.chat.render(chat, add_generation_prompt=prompt)
        assert text == reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=prompt)
        ids = assets.tokenizer.encode(text, add_special_tokens=False)
        encoded = reference.apply_chat_template(chat, add_generation_prompt=prompt, return_dict=False)
        assert ids == encoded


def test_the_default_system_prompt_comes_from_the_template() -> None:
    chat = load_text(embedded_gguf()).chat
    assert chat is not None
    assert chat.render([user("hi")]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize(
    "tools", [None, [{"type": "function", "function": {"name": "f", "description": "<é>"}}]]
)
def test_template_features_equal_transformers(tools: Any) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    chat = [
        {"role": "system", "content": "s"},
        user("<b>&'\"é"),
        {"role": "assistant", "content": "2"},
        user("3"),
    ]
    for prompt in (True, False):
        expected, _ = utils.render_jinja_template(
            [chat], tools=tools, chat_template=FEATURES, add_generation_prompt=prompt, extra="!", **SPECIAL
        )
        got = ChatTemplate(FEATURES, SPECIAL).render(
            chat, add_generation_prompt=prompt, tools=tools, extra="!"
        )
        assert got == expected[0]
    assert "<user>" in got and "<b>" in got and '"2" 2' in got and '"3"' not in got


@pytest.mark.parametrize(
    ("template", "content", "text"),
    [
        (STRINGS, "a", "<s>[user]a</s>"),
        (STRINGS, parts("a"), "<s>[user]a</s>"),
        (STRINGS, parts("a", "b"), "<s>[user]a\nb</s>"),
        (STRINGS, [], "<s>[user]</s>"),
        (PRINTS, parts("a", "b"), "[user]a\nb"),
        (PARTS, "a", "[user]a"),
        (PARTS, parts("a", "b"), "[user]ab"),
        (BOTH, "a", "[user]a"),
        (BOTH, parts("a"), "[user]a"),
        (BOTH, parts("a", "b"), "[user]ab"),
    ],
)
def test_content_arrives_in_the_form_the_template_takes(template: str, content: Any, text: str) -> None:
    assert ChatTemplate(template, SPECIAL).render([user(content)]) == text


def test_tool_template_null_fields_and_tool_arguments() -> None:
    calls = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        "{{ c.function.arguments.x }}{% endfor %}{% endfor %}"
    )
    template = ChatTemplate({"default": calls, "tool_use": "{{ tools | length }} tools"})
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    answer = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None}
    assert template.render([answer]) == "é"
    assert call["function"]["arguments"] == '{"x": "é"}'  # the caller's message is left alone
    assert template.render([answer], tools=[{"type": "function"}]) == "1 tools"
    assert template.render([user("x", name=None)], tools=[]) == ""
    assert (
        ChatTemplate("{{ messages[0] }}").render([answer | {"tool_calls": None}])
        == "{'role': 'assistant', 'content': ''}"
    )


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("hi", r"messages\[0\] must be an object, found str"),
        ({"content": "x"}, r"messages\[0\]\.role must be a string, found None"),
        ({"role": 3, "content": "x"}, r"messages\[0\]\.role must be a string, found 3"),
        ({"role": "user"}, r"messages\[0\]\.content is required"),
        ({"role": "user", "content": None}, r"messages\[0\]\.content is required"),
        (
            {"role": "user", "content": 5},
            r"messages\[0\]\.content must be a string or a list of parts, found int",
        ),
        ({"role": "user", "content": {"a": 1}}, r"messages\[0\]\.content must be a string .*, found dict"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\] is of type 'image_url'"),
        ({"role": "user", "content": ["x"]}, r"content\[0\] is of type 'str'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\]\.text must be a string"),
        ({"role": "assistant", "tool_calls": "x"}, r"messages\[0\]\.tool_calls must be a list, found str"),
        ({"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}, "arguments is not JSON"),
    ],
)
def test_malformed_messages_are_refused(message: Any, error: str) -> None:
    with pytest.raises(RequestError, match=error) as caught:
        ChatTemplate(STRINGS, SPECIAL).render([message])
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7].content + 'x' }}", "has no element 7"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "not safely callable|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(999999999) %}{% endfor %}", "[Rr]ange"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_errors_inside_a_template_are_the_request_s(template: str, reason: str) -> None:
    with pytest.raises(RequestError, match=f"chat template refuses these messages: .*({reason})") as caught:
        ChatTemplate(template).render([user("x")])
    assert caught.value.param == "messages"


def test_variables_of_a_request_cannot_replace_what_is_given() -> None:
    template = ChatTemplate("{{ self is defined }}{{ enable_thinking }}")
    assert template.render([], enable_thinking=False).endswith("False")
    for name in ("messages", "documents"):
        with pytest.raises(RequestError, match=f"{name} is not a free template variable") as caught:
            template.render([], **{name: []})
        assert caught.value.param == "chat_template_kwargs"


def test_templates_that_cannot_be_used_fail_at_start() -> None:
    with pytest.raises(CheckpointError, match="the chat template 'tool_use' does not compile"):
        ChatTemplate({"default": "x", "tool_use": "{{"})
    with pytest.raises(CheckpointError, match="no chat template is named 'default'; found: rag"):
        ChatTemplate({"rag": "x"})
