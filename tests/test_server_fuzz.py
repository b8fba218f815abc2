"""Any JSON body gets 200 or a well-formed 4xx: never a 500, never a hang, never a leak."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_fake import MODEL, Served, served

from xspec.server.sampling import UNSUPPORTED

NAMES = [
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "min_tokens", "temperature",
    "top_k",
    "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop",
    "stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "seed", "n",
    "best_of",
    "logprobs", "top_logprobs", "echo", "stream", "stream_options", "add_special_tokens", "return_token_ids",
    "request_id", "user", "chat_template_kwargs", "add_generation_prompt", "continue_final_message", "tokens",
    "return_token_strs", *(name for name, _, _ in UNSUPPORTED),
]  # fmt: skip

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.integers(-3, 20)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(0, 2)
    | st.text(max_size=8)
    | st.sampled_from(["text", "user", "assistant", "system", "auto", "1", "256", MODEL])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "1", "300", *NAMES]), inner, max_size=4
        )
    ),
    max_leaves=8,
)
good_message = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": st.text(max_size=10)}
)
prompts = st.text(max_size=10) | st.lists(st.integers(0, 256), max_size=4) | st.lists(st.text(max_size=4))
budgets = st.integers(1, 8)
GOOD = {
    "/v1/completions": st.fixed_dictionaries({"prompt": prompts, "max_tokens": budgets}),
    "/v1/chat/completions": st.fixed_dictionaries(
        {"messages": st.lists(good_message, min_size=1, max_size=3), "max_tokens": budgets}
    ),
    "/tokenize": st.fixed_dictionaries({"prompt": st.text(max_size=10)}),
    "/detokenize": st.fixed_dictionaries({"tokens": st.lists(st.integers(0, 256), max_size=9)}),
}
wild = st.dictionaries(st.sampled_from(NAMES), values, max_size=4)


@pytest.fixture
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as one:
        yield one


async def check(server: Served, path: str, body: Any) -> int:
    async with asyncio.timeout(20):
        async with server.http.post(
            server.url + path, data=orjson.dumps(body), headers={"Content-Type": "application/json"}
        ) as response:
            status, content = response.status, await response.read()
    if status == 200:
        if response.content_type == "text/event-stream":
            assert content.endswith(b"data: [DONE]\n\n") and b'"error"' not in content
        else:
            orjson.loads(content)
    else:
        assert 400 <= status < 500, (status, content, body)
        error = orjson.loads(content)["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["message"]
    async with asyncio.timeout(2):  # the handler may end a moment after its last byte
        while server.engine.live or server.handle.active:
            await asyncio.sleep(0)
    return status


@pytest.mark.parametrize("path", list(GOOD))
def test_no_body_breaks_the_server(runner: asyncio.Runner, path: str) -> None:
    statuses = set()
    context = served()
    server = runner.run(context.__aenter__())

    @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
    @given(body=st.builds(lambda good, odd: {**good, **odd}, GOOD[path], wild) | GOOD[path] | values)
    def each(body: Any) -> None:
        statuses.add(runner.run(check(server, path, body)))

    try:
        each()
    finally:
        runner.run(context.__aexit__(None, None, None))
    assert {200, 400} <= statuses, "the bodies reach both sides of the check"


def test_every_field_of_the_wrong_kind_is_refused_or_harmless(runner: asyncio.Runner) -> None:
    async def all_of_them() -> None:
        odd: list[Any] = [
            True,
            -1,
            0,
            1.5,
            2**64 - 1,
            -(2**63),
            1e308,
            "",
            "x",
            [],
            [[]],
            [None],
            {},
            {"a": {}},
        ]
        async with served() as server:
            for path in ("/v1/completions", "/v1/chat/completions"):
                for name in NAMES:
                    for value in odd:
                        body = {
                            "prompt": "a",
                            "messages": [{"role": "user", "content": "a"}],
                            "max_tokens": 2,
                        }
                        await check(server, path, {**body, name: value})

    runner.run(all_of_them())
