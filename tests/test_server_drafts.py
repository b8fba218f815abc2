"""Speculation as HTTP clients see it: the request field, the metrics of responses, /metrics."""

from __future__ import annotations

from typing import Any

import pytest
from server_fake import MODEL, FakeEngine, Script, Served, served

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = {"prompt": "abcdefgh"}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

# "0:abcdefgh" in steps of three: a prompt step, two drafts with two tokens accepted, one that ends at once.
COUNTS = {
    "mean_acceptance_length": 1 + 4 / 3,
    "draft_acceptance_rate": 4 / 9,
    "acceptance_histogram": [1, 0, 2, 0, 0],
    "acceptance_histogram_by_draft_length": {"1": [1, 0], "4": [0, 0, 2, 0, 0]},
    "num_spec_steps": 3,
    "num_accepted_draft_tokens": 4,
    "num_draft_tokens": 9,
    "num_spec_tokens": 4,
}
NO_DRAFTS = {
    "mean_acceptance_length": 1.0,
    "draft_acceptance_rate": 0.0,
    "acceptance_histogram": [0, 0, 0, 0, 0],
    "acceptance_histogram_by_draft_length": {},
    "num_spec_steps": 0,
    "num_accepted_draft_tokens": 0,
    "num_draft_tokens": 0,
    "num_spec_tokens": 4,
}


def drafting() -> FakeEngine:
    return FakeEngine(Script(step_tokens=3), draft_width=4)


async def answer(server: Served, path: str, **body: Any) -> Any:
    status, found = await server.post(path, body)
    assert status == 200, found
    return found


async def test_a_response_tells_how_its_drafts_fared() -> None:
    async with served(drafting()) as server:
        whole = await answer(server, "/v1/completions", **TEXT)
        assert whole["choices"][0]["text"] == "0:abcdefgh"
        assert whole["metrics"] == {"speculative_decoding": COUNTS}
        assert whole["usage"]["completion_tokens"] == 10, "rejected drafts are no completion tokens"
        chat = await answer(server, "/v1/chat/completions", **CHAT)
        assert chat["metrics"]["speculative_decoding"]["num_spec_steps"] == 6  # 21 tokens, three a step
        assert list(chat) == [*list(whole)]


async def test_a_stream_tells_it_with_the_usage_only() -> None:
    async with served(drafting()) as server:
        frames = await server.events("/v1/completions", {**TEXT, **USAGE})
        assert frames[-1]["metrics"] == {"speculative_decoding": COUNTS}
        assert frames[-1]["choices"] == [] and frames[-1]["usage"]["completion_tokens"] == 10
        assert not any("metrics" in frame for frame in frames[:-1])
        frames = await server.events("/v1/completions", {**TEXT, "stream": True})
        assert not any("metrics" in frame for frame in frames)
        frames = await server.events("/v1/chat/completions", {**CHAT, **USAGE})
        assert frames[-1]["metrics"]["speculative_decoding"]["num_spec_steps"] == 6


async def test_without_a_drafter_no_response_speaks_of_drafts() -> None:
    async with served() as server:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            assert "metrics" not in await answer(server, path, **body)
            frames = await server.events(path, {**body, **USAGE})
            assert not any("metrics" in frame for frame in frames)
        async with server.http.get(server.url + "/metrics") as response:
            assert "spec_decode" not in await response.text()


@pytest.mark.parametrize("body", [{**TEXT, "n": 2}, {"prompt": ["a", "b"]}])
async def test_several_streams_of_tokens_have_no_common_numbers(body: dict[str, Any]) -> None:
    async with served(drafting()) as server:
        found = await answer(server, "/v1/completions", **body)
        assert found["metrics"] == {"speculative_decoding": None}


async def test_a_request_may_do_without() -> None:
    async with served(drafting()) as server:
        for path, body in (("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)):
            found = await answer(server, path, **body, speculative=False)
            assert found["metrics"] == {"speculative_decoding": NO_DRAFTS}
        await answer(server, "/v1/completions", **TEXT, speculative=True)
        await answer(server, "/v1/completions", **TEXT, speculative=None)
        assert [call.params.speculative for call in server.engine.calls] == [False, False, True, True]
        status, refusal = await server.post("/v1/completions", {**TEXT, "speculative": "no"})
        assert (status, refusal["error"]["param"]) == (400, "speculative")
        assert refusal["error"]["message"] == "speculative must be true or false, found 'no'."


async def test_scoring_a_prompt_drafts_nothing() -> None:
    async with served(drafting()) as server:
        body = {**TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}
        found = await answer(server, "/v1/completions", **body)
        assert found["metrics"] == {"speculative_decoding": NO_DRAFTS}
        assert found["usage"]["completion_tokens"] == 0


async def test_responses_add_up_to_the_counters() -> None:
    async with served(drafting()) as server:
        for _ in range(3):
            await answer(server, "/v1/completions", **TEXT)
        async with server.http.get(server.url + "/metrics") as response:
            lines = (await response.text()).splitlines()
    label = f'{{model_name="{MODEL}"}}'
    for name, count in (("drafts", 9), ("draft_tokens", 27), ("accepted_tokens", 12)):
        assert f"xspec:spec_decode_num_{name}_total{label} {float(count)}" in lines
    assert f"xspec:generation_tokens_total{label} 30.0" in lines
