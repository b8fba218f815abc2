"""Bodies into parameters: every field of the sampling set, by value and by refusal."""

from __future__ import annotations

from typing import Any

import pytest

from xspec.core.request import SamplingParams
from xspec.errors import RequestError
from xspec.server.sampling import SamplingContext
from xspec.server.schema import (
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
    parse_detokenize,
    parse_tokenize,
)

CONTEXT = SamplingContext(vocab_size=257, defaults={})
MESSAGES = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionBody:
    return parse_completion({"prompt": "x", **fields}, CONTEXT)


def chat(**fields: Any) -> ChatBody:
    return parse_chat({"messages": MESSAGES, **fields}, CONTEXT)


def param_of(parse: Any, **fields: Any) -> str | None:
    with pytest.raises(RequestError) as refused:
        parse(**fields)
    return refused.value.param


def test_nothing_but_a_prompt_means_neutral_values_and_sixteen_tokens() -> None:
    assert completion().common.params == SamplingParams(max_tokens=16)
    assert chat().common.params == SamplingParams(max_tokens=None)
    assert completion().common.add_special_tokens is True
    assert chat().common.add_special_tokens is False


def test_every_sampling_field_arrives() -> None:
    params = completion(
        max_tokens=7, min_tokens=2, temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1, presence_penalty=-2,
        frequency_penalty=2, repetition_penalty=1.1, logit_bias={"5": -100, "256": 1.5}, stop=["a", "b", "a"],
        stop_token_ids=[1, 2], ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
        seed=-(2**63), n=3, best_of=3, logprobs=2, echo=True, speculative=False,
    ).common.params  # fmt: skip
    assert params == SamplingParams(
        max_tokens=7, min_tokens=2, temperature=0.5, top_k=0, top_p=0.9, min_p=0.1, presence_penalty=-2.0,
        frequency_penalty=2.0, repetition_penalty=1.1, logit_bias={5: -100.0, 256: 1.5}, stop=("a", "b"),
        stop_token_ids=(1, 2), ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
        seed=-(2**63), n=3, logprobs=2, prompt_logprobs=2, speculative=False,
    )  # fmt: skip


def test_null_is_an_omitted_field() -> None:
    names = (
        "max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty", "seed",
        "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos", "n",
        "best_of", "logprobs", "echo", "stream", "stream_options", "user", "request_id", "suffix", "tools",
        "response_format", "model", "include_stop_str_in_output", "skip_special_tokens", "add_special_tokens",
        "speculative",
    )  # fmt: skip
    assert completion(**dict.fromkeys(names)) == completion()


def test_the_models_own_defaults_stand_in_for_omitted_fields_only() -> None:
    context = SamplingContext(
        257, {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.05}
    )
    params = parse_completion({"prompt": "x", "temperature": 0, "top_k": None}, context).common.params
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 20, 0.95)
    assert params.repetition_penalty == 1.05
    assert parse_completion({"prompt": "x", "top_k": 0}, context).common.params.top_k == 0


def test_a_float_that_is_an_integer_counts_as_one() -> None:
    assert completion(max_tokens=16.0, seed=5.0).common.params == SamplingParams(max_tokens=16, seed=5)


@pytest.mark.parametrize(
    ("name", "values"),
    {
        "max_tokens": [0, -1, 1.5, "16", True, 2**63, 1e30, [], {}],
        "min_tokens": [-1, 17, True, "1"],
        "temperature": [-0.1, 100.1, "1", True, [1]],
        "top_k": [-2, 0.5, 2**31, True, "5"],
        "top_p": [0, -0.5, 1.01, True, "1"],
        "min_p": [-0.1, 1.1],
        "presence_penalty": [-2.1, 2.1, "0"],
        "frequency_penalty": [-2.1, 2.1],
        "repetition_penalty": [0, -1, 0.001, 101],
        "seed": [2**63, -(2**63) - 1, 1.5, "1", True, 1e30],
        "n": [0, -1, 129, 1.5, True, "2"],
        "best_of": [2, 0, "1"],
        "logprobs": [-1, 21, True, "1", 0.5],
        "stop": ["", [""], ["a", ""], 5, [5], ["a"] * 17, {}, True, "x" * 1025, [None]],
        "stop_token_ids": [5, [-1], [257], [True], ["1"], [[1]], [1.0], [0] * 257],
        "logit_bias": [
            [], "x", {"a": 1}, {"257": 1}, {"-1": 1}, {"1_0": 1}, {"+1": 1}, {"\u0661": 1}, {"": 1},
            {"1": 101},
            {"1": -100.5}, {"1": "2"}, {"1": None}, {"1": True}, {"9" * 5000: 1},
        ],
        "ignore_eos": [1, "true", []],
        "speculative": [0, 1, "false", [], {}],
        "skip_special_tokens": [0, "false"],
        "include_stop_str_in_output": [1],
        "add_special_tokens": ["no"],
        "return_token_ids": [1],
        "echo": [1, "yes"],
        "stream": [1, "true"],
        "stream_options": [{}, {"include_usage": True}, []],
        "request_id": ["", "a b", "a\r\nb", "x" * 129, 5, "\u00e9"],
        "model": [5, []],
        "suffix": ["x"],
        "prompt_logprobs": [0, 1],
        "use_beam_search": [True],
        "beam_width": [2],
        "length_penalty": [2.0],
        "num_return_sequences": [2],
        "allowed_token_ids": [[1]],
        "bad_words": [["x"]],
        "truncate_prompt_tokens": [5],
        "priority": [1],
        "offline": [True],
        "ttft_slo_ms": [100],
        "prompt_embeds": ["AAAA"],
        "logits_processors": [["x"]],
        "response_format": [{"type": "json_object"}, {"type": "json_schema", "json_schema": {}}, "json", {}],
        "guided_json": [{"type": "object"}, "{}"],
        "guided_regex": ["a+"],
        "guided_choice": [["a", "b"]],
        "guided_grammar": ["root ::= x"],
        "structured_outputs": [{"regex": "a"}],
        "tools": [[{"type": "function"}]],
    }.items(),
)  # fmt: skip
def test_a_wrong_value_is_refused_by_the_name_of_its_field(name: str, values: list[Any]) -> None:
    for value in values:
        assert param_of(completion, **{name: value}) == name, value


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", []), ("suffix", ""), ("response_format", {"type": "text"}), ("priority", 0),
        ("bad_words", []),
        ("use_beam_search", False), ("best_of", 1), ("metadata", {"a": 1}), ("store", True), ("user", "me"),
        ("service_tier", "auto"), ("parallel_tool_calls", True), ("something_new", {"x": [1]}),
        ("offline", False),
    ],
)  # fmt: skip
def test_what_changes_nothing_passes(name: str, value: Any) -> None:
    assert completion(**{name: value}) == completion()


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ("a",)),
        ("", ("",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ((1, 2),)),
        ([[1], [2, 3]], ((1,), (2, 3))),
    ],
)
def test_prompts_in_all_four_shapes(prompt: Any, read: Any) -> None:
    assert completion(prompt=prompt).prompts == read


@pytest.mark.parametrize(
    "prompt",
    [
        None, [], [[]], [[1], []], ["a", 1], [1, "a"], [[1], "a"], [1, [2]], [True], [1.0], [257], [-1], 5,
        {},
        [None], [[None]], [[[1]]], True, [10**40],
    ],
)  # fmt: skip
def test_a_prompt_of_no_shape_is_refused(prompt: Any) -> None:
    assert param_of(completion, prompt=prompt) == "prompt"


def test_scoring_needs_echo_and_generates_one_token() -> None:
    body = completion(max_tokens=0, echo=True, logprobs=1)
    assert body.scoring and body.common.params.max_tokens == 1
    assert param_of(completion, max_tokens=0, echo=True, min_tokens=1) == "min_tokens"
    assert not completion(max_tokens=1, echo=True).scoring


def test_echo_alone_asks_for_no_prompt_logprobs() -> None:
    assert completion(echo=True).common.params.prompt_logprobs is None
    assert completion(logprobs=1).common.params.prompt_logprobs is None


def test_chat_limits_and_logprobs() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).common.params.max_tokens == 9
    assert chat(max_tokens=5).common.params.max_tokens == 5
    assert chat(logprobs=True).common.params.logprobs == 0
    assert chat(logprobs=True, top_logprobs=20).common.params.logprobs == 20
    assert chat(logprobs=False, top_logprobs=0).common.params.logprobs is None
    assert param_of(chat, top_logprobs=1) == "top_logprobs"
    assert param_of(chat, logprobs=True, top_logprobs=21) == "top_logprobs"
    assert param_of(chat, logprobs=2) == "logprobs"
    assert param_of(chat, max_completion_tokens=0) == "max_completion_tokens"
    assert param_of(chat, echo=True) == "echo"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]), ("function_call", {"name": "f"}), ("tool_choice", "required"),
        ("tool_choice", {"type": "function"}), ("audio", {"voice": "x"}), ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content"}), ("web_search_options", {}), ("reasoning_effort", "high"),
        ("chat_template", "{{ x }}"), ("documents", [{}]), ("chat_template_kwargs", {"messages": []}),
        ("chat_template_kwargs", {"self": 1}), ("chat_template_kwargs", 5), ("add_generation_prompt", 1),
        ("continue_final_message", True),
    ],
)  # fmt: skip
def test_chat_refuses_what_it_does_not_do(name: str, value: Any) -> None:
    assert param_of(chat, **{name: value}) == name


def test_neutral_chat_fields_pass() -> None:
    assert (
        chat(tool_choice="none", modalities=["text"], functions=[], audio=None, verbosity="medium") == chat()
    )


def test_messages_become_plain_strings() -> None:
    messages = [
        {"role": "developer", "content": "d"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            "name": "n",
        },
        {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": []},
    ]
    assert chat(messages=messages).chat.messages == (
        {"role": "system", "content": "d"},
        {"role": "user", "content": "a\nb", "name": "n"},
        {"role": "assistant", "content": "", "reasoning_content": "r"},
    )


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"), ([], "messages"), ("hi", "messages"), ({}, "messages"),
        ([5], "messages[0]"), ([{"content": "x"}], "messages[0].role"), ([{"role": []}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "tool", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": []}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([*MESSAGES, {"role": "user", "content": [{"type": "text", "text": ""}, IMAGE]}],
         "messages[1].content[1].type"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], "messages[0].tool_calls"),
    ],
)  # fmt: skip
def test_a_wrong_message_is_refused_by_its_path(messages: Any, param: str) -> None:
    assert param_of(chat, messages=messages) == param


def test_continuing_the_last_message() -> None:
    messages = [*MESSAGES, {"role": "assistant", "content": "Once"}]
    body = chat(messages=messages, continue_final_message=True)
    assert body.chat.continue_final_message and not body.chat.add_generation_prompt
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert param_of(chat, messages=messages, **both) == "continue_final_message"


def test_stream_options() -> None:
    options = completion(
        stream=True, stream_options={"include_usage": True, "other": 1}
    ).common.stream_options
    assert (options.include_usage, options.continuous_usage_stats) == (True, False)
    wrong = {"stream": True, "stream_options": {"include_usage": 1}}
    assert param_of(completion, **wrong) == "stream_options.include_usage"


def test_tokenize_takes_one_source() -> None:
    assert parse_tokenize({"prompt": "x"}).add_special_tokens is True
    assert parse_tokenize({"messages": MESSAGES}).add_special_tokens is False
    for body in ({}, {"prompt": "x", "messages": MESSAGES}, {"prompt": 5}):
        with pytest.raises(RequestError) as refused:
            parse_tokenize(body)
        assert refused.value.param == "prompt"
    with pytest.raises(RequestError):
        parse_detokenize({}, 257)
    assert parse_detokenize({"tokens": [256]}, 257).tokens == (256,)


def test_a_message_about_a_huge_value_stays_short() -> None:
    with pytest.raises(RequestError) as refused:
        completion(temperature="x" * 10**6)
    assert len(str(refused.value)) < 200
