"""The server over loopback with a scripted engine: answers, statuses, headers, keys, CORS."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pytest
from blockbuster import BlockBuster, blockbuster_ctx
from server_fake import MAX_LEN, MODEL, FakeEngine, Script, Served, served

from xspec.engine.api import Phase
from xspec.server.handle import ServiceSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
CHAT_PROMPT = "[user]hi[assistant]"
JSON = {"Content-Type": "application/json"}


@pytest.fixture(autouse=True)
def nothing_blocks_the_loop() -> Iterator[BlockBuster]:
    with blockbuster_ctx("xspec") as guard:
        yield guard


async def raw(server: Served, path: str, data: bytes, **headers: str) -> tuple[int, Any]:
    async with server.http.post(server.url + path, data=data, headers={**JSON, **headers}) as response:
        return response.status, await response.json()


def error(body: Any) -> dict[str, Any]:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    found: dict[str, Any] = body["error"]
    return found


# ── completions ──


async def test_a_completion_is_exactly_this() -> None:
    async with served() as server:
        status, body = await server.post("/v1/completions", {"model": MODEL, "prompt": "hey"})
    assert status == 200
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [
            {"index": 0, "text": "0:hey", "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 5,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_prompts_and_choices_keep_their_order() -> None:
    async with served() as server:
        body = {"prompt": ["aa", "b"], "n": 2, "max_tokens": 4}
        _, answer = await server.post("/v1/completions", body)
        assert [(c["index"], c["text"], c["finish_reason"]) for c in answer["choices"]] == [
            (0, "0:aa", "stop"), (1, "1:aa", "stop"), (2, "0:b", "stop"), (3, "1:b", "stop"),
        ]  # fmt: skip
        assert answer["usage"]["prompt_tokens"] == 3, "a prompt counts once, whatever n"
        assert answer["usage"]["completion_tokens"] == 4 + 4 + 3 + 3
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
        tokenizer = server.engine.text.tokenizer
        _, answer = await server.post("/v1/completions", {"prompt": [tokenizer.encode("x"), [71, 72]]})
        assert [c["text"] for c in answer["choices"]] == ["0:x", "0:" + tokenizer.decode([71, 72])]
        assert not server.engine.live


async def test_the_budget_ends_an_answer_with_length() -> None:
    async with served() as server:
        _, body = await server.post("/v1/completions", {"prompt": "hello", "max_tokens": 2})
        assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("0:", "length")
        _, body = await server.post("/v1/completions", {"prompt": "x" * 40})
        assert body["usage"]["completion_tokens"] == 16, "completions default to 16 tokens"
        _, body = await server.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 40}]}
        )
        assert body["choices"][0]["finish_reason"] == "stop", "chat has no default budget"


async def test_echo_and_logprobs_line_up() -> None:
    async with served() as server:
        body = {"prompt": "ab", "max_tokens": 3, "echo": True, "logprobs": 1, "return_token_ids": True}
        _, answer = await server.post("/v1/completions", body)
        choice = answer["choices"][0]
        ids = server.engine.text.tokenizer.encode("ab0:a")
        assert choice["text"] == "ab0:a"
        assert choice["prompt_token_ids"] == ids[:2] and choice["token_ids"] == ids[2:]
        assert choice["logprobs"] == {
            "tokens": ["a", "b", "0", ":", "a"],
            "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
            "top_logprobs": [None, {"b": -0.5}, {"0": -0.5}, {":": -0.5}, {"a": -0.5}],
            "text_offset": [0, 1, 2, 3, 4],
        }
        _, answer = await server.post("/v1/completions", {"prompt": "ab", "logprobs": 0, "max_tokens": 1})
        assert answer["choices"][0]["logprobs"]["top_logprobs"] == [{"0": -0.5}]
        _, answer = await server.post(
            "/v1/completions", {"prompt": "ab", "echo": True, "n": 2, "max_tokens": 1}
        )
        assert [c["text"] for c in answer["choices"]] == ["ab0", "ab1"]
        _, answer = await server.post("/v1/completions", {"prompt": [65, 256], "echo": True, "max_tokens": 1})
        text = server.engine.text.tokenizer.decode([65]) + "<|end|>0"
        assert answer["choices"][0]["text"] == text, "ids come back as all they stand for"


async def test_scoring_reports_the_prompt_and_no_answer() -> None:
    async with served() as server:
        body = {"prompt": "ab", "max_tokens": 0, "echo": True, "logprobs": 1}
        _, answer = await server.post("/v1/completions", body)
        choice = answer["choices"][0]
        assert choice["text"] == "ab" and choice["finish_reason"] == "length"
        assert choice["logprobs"]["token_logprobs"] == [None, -0.5]
        assert answer["usage"]["completion_tokens"] == 0 and answer["usage"]["total_tokens"] == 2
        frames = await server.events("/v1/completions", {**body, "stream": True})
        assert [c["text"] for f in frames for c in f["choices"]] == ["ab"]


async def test_a_chat_answer_is_exactly_this() -> None:
    async with served() as server:
        body = {**CHAT, "logprobs": True, "top_logprobs": 1, "max_tokens": 1}
        status, answer = await server.post("/v1/chat/completions", body)
    assert status == 200 and answer["id"].startswith("chatcmpl-") and answer["object"] == "chat.completion"
    record = {"token": "0", "logprob": -0.5, "bytes": [48]}
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "0", "refusal": None},
            "logprobs": {"content": [{**record, "top_logprobs": [record]}], "refusal": None},
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert answer["usage"]["prompt_tokens"] == len(CHAT_PROMPT)


async def test_chat_goes_through_the_models_template() -> None:
    async with served() as server:
        post = server.post
        _, body = await post("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"thinking": "!"}})
        assert body["choices"][0]["message"]["content"] == f"0:{CHAT_PROMPT}!"
        _, body = await post("/v1/chat/completions", {**CHAT, "add_generation_prompt": False})
        assert body["choices"][0]["message"]["content"] == "0:[user]hi"
        started = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "Once"}]}
        _, body = await post("/v1/chat/completions", {**started, "continue_final_message": True})
        assert body["choices"][0]["message"]["content"] == "0:[user]hi[assistant]Once"
        late = {"messages": [*CHAT["messages"], {"role": "system", "content": "x"}]}
        status, body = await post("/v1/chat/completions", late)
        assert status == 400 and error(body)["param"] == "messages"
        assert "system comes first" in error(body)["message"]


async def test_a_model_without_template_still_completes() -> None:
    async with served(FakeEngine(chat=False)) as server:
        status, body = await server.post("/v1/chat/completions", CHAT)
        assert status == 400 and error(body)["param"] == "messages"
        assert (await server.post("/v1/completions", {"prompt": "x"}))[0] == 200


async def test_the_models_generation_defaults_reach_the_engine() -> None:
    engine = FakeEngine()
    engine.defaults.update(temperature=0.6, top_k=20)
    async with served(engine) as server:
        await server.post("/v1/chat/completions", {**CHAT, "top_k": -1})
    assert (engine.calls[0].params.temperature, engine.calls[0].params.top_k) == (0.6, 0)


# ── refusals ──


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "data",
    [
        b"", b"  ", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b"{} {}", b'{"a": NaN}', b'{"a": 1e999}',
        b"[" * 5000, b'{"a":' * 5000, b'{"prompt": "\\ud800"}', b"\x00", b"\xef\xbb\xbf{}",
    ],
)  # fmt: skip
async def test_a_body_that_is_no_json_object_is_a_400(path: str, data: bytes) -> None:
    async with served() as server:
        status, body = await raw(server, path, data)
        assert status == 400 and error(body)["type"] == "invalid_request_error"


async def test_statuses_of_refusals() -> None:
    async with served() as server:
        ok = orjson.dumps({"prompt": "x"})
        for kind in (
            "text/plain",
            "application/x-www-form-urlencoded",
            "application/json; charset=latin-1",
            "",
        ):
            status, body = await raw(server, "/v1/completions", ok, **{"Content-Type": kind})
            assert status == 415 and error(body), kind
        status, _ = await raw(
            server, "/v1/completions", ok, **{"Content-Type": "application/json; charset=UTF-8"}
        )
        assert status == 200
        status, body = await server.post("/v1/completions", {"model": "gpt-4", "prompt": "x"})
        assert (status, error(body)["param"], error(body)["code"]) == (404, "model", "model_not_found")
        status, body = await server.post("/v1/nothing", {})
        assert status == 404 and error(body)["code"] == "not_found"
        async with server.http.get(server.url + "/v1/completions") as response:
            assert response.status == 405 and response.headers["Allow"] == "POST"
            error(await response.json())
        for encoding in ("gzip", "deflate", "br"):
            status, body = await raw(server, "/v1/completions", b"zz", **{"Content-Encoding": encoding})
            assert status == 415 and error(body)
        status, body = await server.post("/v1/completions", {"prompt": "x" * MAX_LEN})
        assert (status, error(body)["code"]) == (400, "context_length_exceeded")
        assert error(body)["param"] == "prompt"
        status, body = await server.post("/v1/completions", {"prompt": "x" * 10**6})
        assert (status, error(body)["code"]) == (400, "context_length_exceeded")
        status, body = await server.post("/v1/completions", {"prompt": ["x", ""]})
        assert (status, error(body)["param"]) == (400, "prompt")
        status, body = await server.post("/v1/completions", {"prompt": "x", "temperature": -1})
        assert (status, error(body)["param"]) == (400, "temperature")
        assert not server.engine.live


async def test_a_body_over_the_limit_is_a_413_announced_or_not() -> None:
    async with served(settings=ServiceSettings(max_request_body_bytes=1000)) as server:

        async def pieces() -> Any:
            for _ in range(20):
                yield b" " * 100

        for data in (b" " * 1001, pieces()):
            async with server.http.post(server.url + "/v1/completions", data=data, headers=JSON) as response:
                assert response.status == 413
                error(await response.json())
        status, _ = await raw(server, "/v1/completions", orjson.dumps({"prompt": "x"}).ljust(1000))
        assert status == 200


async def test_a_full_queue_is_a_429_and_leaves_nothing_behind() -> None:
    async with served(FakeEngine(capacity=2)) as server:
        async with server.http.post(
            server.url + "/v1/completions", json={"prompt": ["a", "b", "c"]}
        ) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "1"
            assert error(await response.json())["type"] == "rate_limit_error"
        assert not server.engine.live, "prompts admitted before the refusal are given up"
        assert all(call.closed.is_set() for call in server.engine.calls)
        assert (await server.post("/v1/completions", {"prompt": ["a", "b"]}))[0] == 200


async def test_more_prompts_than_ever_fit_is_a_400() -> None:
    async with served(settings=ServiceSettings(max_concurrent_requests=2)) as server:
        status, body = await server.post("/v1/completions", {"prompt": ["a", "b", "c"]})
        assert status == 400 and error(body)["param"] == "prompt"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_is_a_500(stream: bool) -> None:
    async with served(FakeEngine(Script(fail_after=0))) as server:
        for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
            status, answer = await server.post(path, {**body, "stream": stream})
            assert status == 500 and error(answer)["message"] == "boom"
            assert error(answer)["type"] == "server_error"


async def test_a_dead_engine_is_a_503_everywhere() -> None:
    engine = FakeEngine()
    engine.dead = True
    async with served(engine) as server:
        status, body = await server.post("/v1/completions", {"prompt": "x"})
        assert status == 503 and error(body)["code"] == "service_unavailable"
        async with server.http.get(server.url + "/health") as response:
            assert response.status == 503
            assert await response.json() == {"status": "unavailable", "phase": "dead"}
        async with server.http.get(server.url + "/metrics") as response:
            assert response.status == 200, "what led there stays readable"


async def test_a_programming_error_is_a_plain_500(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine()
    engine.generate = lambda *args, **kwargs: 1 / 0  # type: ignore[method-assign,assignment]
    async with served(engine) as server:
        status, body = await server.post("/v1/completions", {"prompt": "x"})
    assert status == 500 and "division" not in error(body)["message"]
    assert "ZeroDivisionError" in caplog.text


# ── around it ──


async def test_models_version_metrics_server_info() -> None:
    async with served() as server:

        async def get(path: str) -> tuple[int, Any]:
            async with server.http.get(server.url + path) as response:
                return response.status, await response.json()

        status, body = await get("/v1/models")
        assert status == 200 and body["object"] == "list"
        entry = body["data"][0]
        assert (entry["id"], entry["root"], entry["max_model_len"]) == (MODEL, MODEL, MAX_LEN)
        assert {"parent", "permission", "owned_by", "created", "object"} <= set(entry)
        assert await get(f"/v1/models/{MODEL}") == (200, entry)
        status, body = await get("/v1/models/other")
        assert status == 404 and error(body)["code"] == "model_not_found"
        assert await get("/version") == (200, {"version": "0.1.0"})
        assert await get("/health") == (200, {"status": "ok", "phase": "ready"})
        assert await get("/ping") == (200, {"status": "ok", "phase": "ready"})
        status, body = await get("/server_info")
        assert status == 200 and body["engine"] == {"slots": 2} and body["phase"] == "ready"
        async with server.http.get(server.url + "/metrics") as response:
            assert response.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert f'xspec:num_requests_running{{model_name="{MODEL}"}} 0.0' in await response.text()


async def test_tokenize_and_back() -> None:
    async with served() as server:
        tokenizer = server.engine.text.tokenizer
        ids = tokenizer.encode("hé\n")
        status, body = await server.post("/tokenize", {"prompt": "hé\n", "return_token_strs": True})
        assert status == 200
        assert body["tokens"] == ids and body["count"] == 4 and body["max_model_len"] == MAX_LEN
        assert body["token_strs"] == [tokenizer.piece(token) for token in ids]
        assert await server.post("/detokenize", {"tokens": ids}) == (200, {"prompt": "hé\n"})
        _, body = await server.post("/tokenize", CHAT)
        assert body["tokens"] == tokenizer.encode(CHAT_PROMPT) and body["token_strs"] is None
        assert await server.post("/tokenize", {"prompt": ""}) == (
            200,
            {"count": 0, "max_model_len": MAX_LEN, "tokens": [], "token_strs": None},
        )
        assert (await server.post("/detokenize", {"tokens": [999]}))[0] == 400
        assert (await server.post("/tokenize", {"model": "x", "prompt": ""}))[0] == 404


async def test_request_ids_are_honoured_once_they_are_harmless() -> None:
    async with served() as server:
        for sent, kept in (
            ("my-id.1:x_", True),
            ("a b", False),
            ("x" * 129, False),
            ("é", False),
            ("", False),
        ):
            async with server.http.post(
                server.url + "/v1/completions", json={"prompt": "x"}, headers={"X-Request-Id": sent}
            ) as response:
                echoed = response.headers["X-Request-Id"]
                assert (echoed == sent) is kept
                assert (await response.json())["id"] == f"cmpl-{echoed}"
        body = {"prompt": "x", "request_id": "mine"}
        assert (await server.post("/v1/completions", body))[1]["id"] == "cmpl-mine"
        async with server.http.get(server.url + "/nothing", headers={"X-Request-Id": "q"}) as response:
            assert response.headers["X-Request-Id"] == "q", "errors carry it too"
        same = [server.post("/v1/completions", body) for _ in range(5)]
        assert [status for status, _ in await asyncio.gather(*same)] == [200] * 5


async def test_the_key_guards_everything_but_probes() -> None:
    async with served(settings=ServiceSettings(api_key="s3cret")) as server:

        async def status(path: str, key: str | None = None, method: str = "GET") -> int:
            sent = {} if key is None else {"Authorization": key}
            async with server.http.request(method, server.url + path, headers=sent) as response:
                if response.status == 401:
                    assert response.headers["WWW-Authenticate"] == "Bearer"
                    assert error(await response.json())["code"] == "invalid_api_key"
                return response.status

        for path in ("/health", "/ping", "/metrics", "/version"):
            assert await status(path) == 200
        for path in ("/v1/models", "/server_info", "/v1/unknown", "/"):
            assert await status(path) == 401
        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
            assert await status(path, method="POST") == 401
        for header in (
            "Bearer",
            "Bearer ",
            "Bearer s3cre",
            "Bearer s3cret2",
            "Basic s3cret",
            "s3cret",
            "Bearer é",
        ):
            assert await status("/v1/models", header) == 401, header
        assert await status("/v1/models", "Bearer s3cret") == 200
        assert await status("/v1/models", "bearer  s3cret") == 200


async def test_cors_is_off_unless_asked_for() -> None:
    async with served() as server:
        headers = {"Origin": "https://a.example", "Access-Control-Request-Method": "POST"}
        async with server.http.options(server.url + "/v1/completions", headers=headers) as response:
            assert response.status == 405
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_cors_preflight_needs_no_key_and_errors_are_readable() -> None:
    settings = ServiceSettings(api_key="k", cors_allow_origins=("https://a.example",))
    async with served(settings=settings) as server:
        url = server.url + "/v1/chat/completions"
        asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        async with server.http.options(url, headers={**asked, "Origin": "https://a.example"}) as response:
            assert response.status == 204
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert "Authorization" in response.headers["Access-Control-Allow-Headers"]
            assert "POST" in response.headers["Access-Control-Allow-Methods"]
        async with server.http.options(url, headers={**asked, "Origin": "https://b.example"}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers
            assert response.headers["Vary"] == "Origin"
        async with server.http.post(url, json=CHAT, headers={"Origin": "https://a.example"}) as response:
            assert response.status == 401
            assert response.headers["Access-Control-Allow-Origin"] == "https://a.example"
            assert response.headers["Access-Control-Expose-Headers"] == "X-Request-Id"
    async with served(settings=ServiceSettings(cors_allow_origins=("*",))) as server:
        headers = {"Origin": "https://b.example"}
        body = {**CHAT, "stream": True}
        async with server.http.post(
            server.url + "/v1/chat/completions", json=body, headers=headers
        ) as response:
            assert response.headers["Access-Control-Allow-Origin"] == "*"


async def test_health_tells_the_phase_while_there_is_no_engine() -> None:
    async with served() as server:
        handle = server.handle

        async def health() -> tuple[int, Any]:
            async with server.http.get(server.url + "/health") as response:
                return response.status, await response.json()

        handle.engine = None
        handle.progress("loading weights", 3, 10)
        assert await health() == (
            503, {"status": "unavailable", "phase": "loading", "detail": "loading weights (3/10)"},
        )  # fmt: skip
        handle.progress("warm-up", 0, 0)
        assert (await health())[1]["phase"] == Phase.WARMING
        handle.engine, handle.draining = server.engine, True
        assert (await health())[1] == {"status": "unavailable", "phase": "draining"}
        handle.engine, handle.draining = None, False
        async with server.http.post(server.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503 and response.headers["Retry-After"] == "5"
            assert "warming" in error(await response.json())["message"]
        async with server.http.get(server.url + "/metrics") as response:
            assert response.status == 503
        async with server.http.get(server.url + "/v1/models") as response:
            assert response.status == 503


async def test_a_refusal_before_any_middleware_is_still_an_answer() -> None:
    async with (
        served() as server,
        server.http.post(
            server.url + "/v1/completions", json={"prompt": "x"}, headers={"Expect": "miracles"}
        ) as response,
    ):
        assert response.status == 417


async def test_long_texts_are_tokenised_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(FakeEngine(Script(texts=["ok"]))) as server:
        tokenizer, threads = server.engine.text.tokenizer, []
        encode = tokenizer.encode

        def watched(text: str, add_special_tokens: bool = True) -> list[int]:
            if text != "ok":  # the fake engine encodes what it answers
                threads.append(threading.current_thread() is threading.main_thread())
            return encode(text, add_special_tokens)

        monkeypatch.setattr(tokenizer, "encode", watched)
        long = "x" * 4000
        await server.post("/v1/completions", {"prompt": "short"})
        await server.post("/v1/completions", {"prompt": long})
        await server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": long}]})
        await server.post("/tokenize", {"prompt": long})
    assert threads == [True, False, False, False]


async def test_malformed_http_gets_its_400_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    async with served() as server:
        port = int(server.url.rsplit(":", 1)[1])
        for junk in (
            b"GARBAGE\r\n\r\n",
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\na b: c\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(junk)
            assert b" 400 " in await reader.readline(), junk
            writer.close()
        status, _ = await server.post("/v1/completions", {"prompt": "still here"})
    assert status == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
