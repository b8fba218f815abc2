"""The real `openai` client against the server: what it parses, and which exceptions it raises."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import openai
import pytest
from server_fake import MODEL, FakeEngine, Script, Served, served

from xspec.server.handle import ServiceSettings

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(server: Served, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0) as client:
        yield client


async def test_models() -> None:
    async with served() as server, client_of(server) as client:
        listed = [model async for model in client.models.list()]
        assert [model.id for model in listed] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "xspec"


async def test_chat() -> None:
    async with served() as server, client_of(server) as client:
        answer = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=2, logprobs=True, top_logprobs=2, seed=1, user="u",
            response_format={"type": "text"}, extra_body={"top_k": 5, "min_tokens": 1},
        )  # fmt: skip
    assert [choice.message.content for choice in answer.choices] == [
        f"{c}:[user]hi[assistant]" for c in (0, 1)
    ]
    first = answer.choices[0]
    assert first.finish_reason == "stop" and first.logprobs is not None and first.logprobs.content is not None
    assert first.logprobs.content[0].token == "0" and len(first.logprobs.content[0].top_logprobs) == 2
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.total_tokens == 19 + 42 and answer.usage.prompt_tokens_details.cached_tokens == 9
    assert server.engine.calls[0].params.top_k == 5


async def test_chat_stream() -> None:
    async with served() as server, client_of(server) as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "0:[user]hi[assistant]"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert (
        chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 21
    )


async def test_the_streaming_helper_rebuilds_the_whole_answer() -> None:
    async with (
        served() as server,
        client_of(server) as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2) as stream,
    ):
        async for _ in stream:
            pass
        answer = await stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == [
        f"{c}:[user]hi[assistant]" for c in (0, 1)
    ]


async def test_completions() -> None:
    async with served() as server, client_of(server) as client:
        answer = await client.completions.create(
            model=MODEL, prompt=["a", "b"], logprobs=1, echo=True, max_tokens=1
        )
        assert [choice.text for choice in answer.choices] == ["a0", "b0"]
        logprobs = answer.choices[1].logprobs
        assert logprobs is not None and logprobs.tokens == ["b", "0"] and logprobs.text_offset == [0, 1]
        stream = await client.completions.create(model=MODEL, prompt=[65, 66], stream=True)
        texts = [chunk.choices[0].text async for chunk in stream]
        assert "".join(texts) == "0:" + server.engine.text.tokenizer.decode([65, 66])


async def test_errors_become_the_clients_exceptions() -> None:
    settings = ServiceSettings(api_key="k")
    async with served(FakeEngine(capacity=1), settings) as server, client_of(server, "k") as client:
        create: Any = client.chat.completions.create
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model=MODEL, messages=MESSAGES, temperature=-1)
        assert refused.value.param == "temperature" and "temperature must be" in refused.value.message
        with pytest.raises(openai.BadRequestError) as refused:
            await create(
                model=MODEL, messages=MESSAGES, tools=[{"type": "function", "function": {"name": "f"}}]
            )
        assert refused.value.param == "tools"
        with pytest.raises(openai.BadRequestError) as refused:
            await create(model=MODEL, messages=[{"role": "user", "content": "x" * 999}])
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.NotFoundError) as missing:
            await create(model="gpt-4", messages=MESSAGES)
        assert missing.value.code == "model_not_found"
        with pytest.raises(openai.RateLimitError):
            await client.completions.create(model=MODEL, prompt=["a", "b"])
        server.engine.dead = True
        with pytest.raises(openai.InternalServerError) as dead:
            await create(model=MODEL, messages=MESSAGES)
        assert dead.value.status_code == 503
    async with served(settings=settings) as server, client_of(server, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


async def test_an_error_inside_a_stream_is_raised_while_reading() -> None:
    async with served(FakeEngine(Script(fail_after=3))) as server, client_of(server) as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        seen = []
        with pytest.raises(openai.APIError, match="boom"):
            async for chunk in stream:
                seen.append(chunk.choices[0].delta.content)
    assert "".join(filter(None, seen)) == "0:["


async def test_closing_a_stream_early_frees_the_engine() -> None:
    async with served(FakeEngine(Script(delay_s=0.002))) as server, client_of(server) as client:
        stream = await client.completions.create(model=MODEL, prompt="x" * 200, max_tokens=200, stream=True)
        async for _ in stream:
            break
        await stream.close()
        async with asyncio.timeout(2):
            await server.engine.calls[0].closed.wait()
        assert not server.engine.calls[0].completed


async def test_raw_response_carries_the_request_id() -> None:
    async with served() as server, client_of(server) as client:
        raw = await client.completions.with_raw_response.create(
            model=MODEL, prompt="a", extra_headers={"X-Request-Id": "abc"}
        )
        assert raw.headers["x-request-id"] == "abc" and raw.parse().id == "cmpl-abc"
