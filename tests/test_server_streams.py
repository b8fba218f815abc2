"""Streams: frames and their order, failures inside them, readers that are slow or gone."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from server_fake import FakeEngine, Script, Served, served

from xspec.core.request import SamplingParams
from xspec.server.generation import ADMITTED_AT_A_TIME, BUFFERED_OUTPUTS, generation
from xspec.server.sse import ChunkFrames

CHAT = {"messages": [{"role": "user", "content": "hi"}], "stream": True}


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[BlockBuster]:
    with blockbuster_ctx("xspec") as guard:
        yield guard


async def until(condition: Any, timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)


def test_frames_are_the_json_they_stand_for() -> None:
    frames = ChunkFrames({"id": "a", "model": 'q"\n'}, null_usage=False)
    assert frames.choice({"index": 0, "text": "é\n\n"}) == (
        b'data: {"id":"a","model":"q\\"\\n","choices":[{"index":0,"text":"\xc3\xa9\\n\\n"}]}\n\n'
    )
    null = ChunkFrames({"id": "a"}, null_usage=True)
    assert null.choice({"index": 0}) == b'data: {"id":"a","choices":[{"index":0}],"usage":null}\n\n'
    assert (
        null.choice({}, {"total_tokens": 1})
        == b'data: {"id":"a","choices":[{}],"usage":{"total_tokens":1}}\n\n'
    )
    assert null.usage({"total_tokens": 1}) == b'data: {"id":"a","choices":[],"usage":{"total_tokens":1}}\n\n'
    assert null.usage({}, {"x": None}) == b'data: {"id":"a","choices":[],"usage":{},"metrics":{"x":null}}\n\n'


async def test_a_completion_stream_is_exactly_this() -> None:
    async with served(FakeEngine(Script(step_tokens=2))) as server:
        body = {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}}
        frames = await server.events("/v1/completions", body)
    shared = {key: frames[0][key] for key in ("id", "object", "created", "model", "system_fingerprint")}
    assert shared["object"] == "text_completion" and shared["id"].startswith("cmpl-")

    def chunk(text: str, reason: str | None) -> dict[str, Any]:
        entry = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}
        return {**shared, "choices": [entry], "usage": None}

    usage = {
        "prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8,
        "prompt_tokens_details": {"cached_tokens": 1},
    }  # fmt: skip
    assert frames == [
        chunk("0:", None), chunk("ab", None), chunk("c", "stop"), {**shared, "choices": [], "usage": usage},
    ]  # fmt: skip


async def test_without_usage_no_chunk_mentions_it() -> None:
    async with served() as server:
        frames = await server.events("/v1/completions", {"prompt": "a", "stream": True})
        assert all("usage" not in frame for frame in frames)
        options = {"continuous_usage_stats": True}
        frames = await server.events(
            "/v1/completions", {"prompt": "a", "stream": True, "stream_options": options}
        )
        assert [f["usage"]["completion_tokens"] for f in frames] == [1, 2, 3]
        assert frames[-1]["usage"]["prompt_tokens"] == 1


async def test_a_chat_stream_opens_with_the_role_and_ends_with_a_reason() -> None:
    async with served(FakeEngine(Script(texts=["hey"]))) as server:
        frames = await server.events("/v1/chat/completions", CHAT)
    assert {frame["object"] for frame in frames} == {"chat.completion.chunk"}
    assert len({frame["id"] for frame in frames}) == 1
    assert [frame["choices"][0]["delta"] for frame in frames] == [
        {"role": "assistant", "content": ""}, {"content": "h"}, {"content": "e"}, {"content": "y"},
    ]  # fmt: skip
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None, None, None, "stop"]


async def test_prompts_and_choices_interleave_under_their_index() -> None:
    async with served(FakeEngine(Script(delay_s=0.001))) as server:
        body = {"prompt": ["aa", "bb"], "n": 2, "stream": True, "stream_options": {"include_usage": True}}
        frames = await server.events("/v1/completions", body)
    assert frames[-1]["choices"] == [] and frames[-1]["usage"]["completion_tokens"] == 16
    texts: dict[int, str] = {}
    ended = []
    for frame in frames[:-1]:
        choice = frame["choices"][0]
        assert choice["index"] not in ended, "nothing follows a finish_reason"
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        if choice["finish_reason"]:
            ended.append(choice["index"])
    assert texts == {0: "0:aa", 1: "1:aa", 2: "0:bb", 3: "1:bb"}
    assert sorted(ended) == [0, 1, 2, 3]
    indices = [frame["choices"][0]["index"] for frame in frames[:-1]]
    assert len(list(itertools.groupby(indices))) > 4, "choices come side by side, not one after the other"


async def test_held_back_text_makes_no_empty_chunks_but_loses_nothing() -> None:
    async with served(FakeEngine(Script(texts=["añ🙂b"], hold_back=2))) as server:
        frames = await server.events("/v1/completions", {"prompt": "x", "stream": True})
        texts = [frame["choices"][0]["text"] for frame in frames]
        assert "".join(texts) == "añ🙂b" and all(texts)
        frames = await server.events("/v1/completions", {"prompt": "x", "stream": True, "logprobs": 0})
        tokens = [token for frame in frames for token in frame["choices"][0]["logprobs"]["tokens"]]
        offsets = [offset for frame in frames for offset in frame["choices"][0]["logprobs"]["text_offset"]]
        assert len(tokens) == 8 and offsets == list(range(8))
        frames = await server.events("/v1/chat/completions", {**CHAT, "logprobs": True, "max_tokens": 3})
        entries = [
            e for f in frames if f["choices"][0]["logprobs"] for e in f["choices"][0]["logprobs"]["content"]
        ]
        assert bytes(b for entry in entries for b in entry["bytes"]) == "añ".encode()


async def test_a_stream_with_echo_and_token_ids() -> None:
    async with served() as server:
        body = {"prompt": "ab", "stream": True, "echo": True, "logprobs": 0, "return_token_ids": True}
        frames = await server.events("/v1/completions", body)
        choices = [frame["choices"][0] for frame in frames]
        assert [choice["text"] for choice in choices] == ["ab0", ":", "a", "b"]
        assert choices[0]["logprobs"]["text_offset"] == [0, 1, 2] and choices[1]["logprobs"][
            "text_offset"
        ] == [3]
        encode = server.engine.text.tokenizer.encode
        assert [choice["prompt_token_ids"] for choice in choices] == [encode("ab"), None, None, None]
        assert [token for choice in choices for token in choice["token_ids"]] == encode("0:ab")


async def test_a_failure_inside_a_stream_ends_it_with_an_error_object() -> None:
    async with served(FakeEngine(Script(fail_after=2, texts=["abcdef", "abcdef"]))) as server:
        frames = await server.events("/v1/completions", {"prompt": "x", "n": 2, "stream": True})
    assert [frame["choices"][0]["text"] for frame in frames[:-1]] == ["a", "a", "b", "b"]
    assert frames[-1] == {
        "error": {"message": "boom", "type": "server_error", "param": None, "code": "engine_error"}
    }
    assert not server.engine.live


async def test_a_shutdown_that_runs_out_of_time_tells_its_streams() -> None:
    async with served(FakeEngine(Script(delay_s=0.005))) as server:
        streaming = asyncio.create_task(server.events("/v1/completions", {"prompt": "x" * 200, "stream": True,
                                                                          "max_tokens": 200}))  # fmt: skip
        whole = asyncio.create_task(server.post("/v1/completions", {"prompt": "x" * 200, "max_tokens": 200}))
        await until(lambda: len(server.engine.calls) == 2 and server.engine.calls[0].steps > 3)
        server.engine.aborting = True
        assert (await streaming)[-1]["error"]["code"] == "service_unavailable"
        assert (await whole)[0] == 503


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompts", [["x"], ["x", "y"]])
async def test_a_client_that_leaves_ends_its_requests(stream: bool, prompts: list[str]) -> None:
    engine = FakeEngine(Script(delay_s=0.002, texts=["z" * 5000]))
    async with served(engine) as server:
        body = {"prompt": prompts, "max_tokens": 5000, "stream": stream}
        request = asyncio.create_task(server.http.post(server.url + "/v1/completions", json=body))
        await until(lambda: len(engine.calls) == len(prompts) and engine.calls[0].steps >= 3)
        if stream:
            response = await request
            assert await response.content.readany()
            response.close()
        else:
            request.cancel()
        await until(lambda: all(call.closed.is_set() for call in engine.calls), 1.0)
        assert not engine.live and not any(call.completed for call in engine.calls)
        assert server.handle.active == 0
        steps = [call.steps for call in engine.calls]
        await asyncio.sleep(0.02)
        assert [call.steps for call in engine.calls] == steps, "nothing reads them any more"


async def test_a_slow_reader_holds_its_stream_up_and_nobody_else() -> None:
    engine = FakeEngine(Script(texts=["y" * 200_000, "y" * 200_000], step_tokens=1))
    async with served(engine) as server:
        port = int(server.url.rsplit(":", 1)[1])
        body = orjson.dumps({"prompt": "x", "stream": True, "max_tokens": 200_000, "n": 2})
        head = (
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        )
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(head + str(len(body)).encode() + b"\r\n\r\n" + body)
        await reader.readline()
        last = -1
        async with asyncio.timeout(20):
            while not engine.calls or engine.calls[0].steps != last:  # until the transport is full
                last = engine.calls[0].steps if engine.calls else -1
                await asyncio.sleep(0.1)
        assert 0 < last < 200_000 - BUFFERED_OUTPUTS
        engine.script = Script()
        assert (await server.post("/v1/completions", {"prompt": "q"}))[1]["choices"][0]["text"] == "0:q"
        writer.close()
        await until(lambda: not engine.live)


async def test_many_streams_with_random_departures_leave_nothing() -> None:
    engine = FakeEngine(Script(delay_s=0.001))
    async with served(engine) as server:

        async def one(number: int, server: Served) -> int:
            body = {"prompt": ["x" * 20] * (1 + number % 3), "stream": number % 2 == 0, "max_tokens": 22}
            async with server.http.post(server.url + "/v1/completions", json=body) as response:
                if number % 5 == 0:
                    return 0
                return len(await response.read())

        sizes = await asyncio.gather(*(one(number, server) for number in range(60)))
        assert all(size > 0 for number, size in enumerate(sizes) if number % 5)
        await until(lambda: not engine.live and server.handle.active == 0)
        assert len(engine.calls) == sum(1 + number % 3 for number in range(60))


async def test_a_cancellation_during_clean_up_leaves_no_request_behind() -> None:
    engine = FakeEngine(Script(delay_s=0.001))
    entered = asyncio.Event()

    async def handler() -> None:
        async with generation(engine, [(1,), (2,)], SamplingParams(), "r") as batches:
            await anext(batches)
            entered.set()
            raise ConnectionResetError  # what writing to a client that left does

    task = asyncio.create_task(handler())
    await entered.wait()
    task.cancel()  # aiohttp notices a moment later
    with pytest.raises(asyncio.CancelledError):
        await task
    assert all(call.closed.is_set() for call in engine.calls) and not engine.live


async def test_admitting_many_choices_gives_others_a_turn() -> None:
    engine = FakeEngine()
    turns: list[int] = []  # requests admitted when somebody else ran

    async def bystander() -> None:
        while True:
            turns.append(len(engine.calls))
            await asyncio.sleep(0)

    task = asyncio.create_task(bystander())
    await asyncio.sleep(0)
    n = ADMITTED_AT_A_TIME // 4
    async with generation(engine, [(1,)] * 12, SamplingParams(n=n), "r"):
        assert len(engine.calls) == 12
        assert turns == [0, 4, 8]
        task.cancel()
    assert not engine.live


async def test_a_cancellation_between_admissions_leaves_no_request_behind() -> None:
    engine = FakeEngine()

    async def handler() -> None:
        async with generation(engine, [(1,)] * 3, SamplingParams(n=ADMITTED_AT_A_TIME), "r"):
            raise AssertionError("cancelled before all were admitted")

    task = asyncio.create_task(handler())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(engine.calls) == 1 and not engine.live
