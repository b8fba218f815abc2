"""The life of the serving process: ports, loading, signals, drains, exit codes."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from server_fake import FakeEngine, Script

from xspec.config import Config
from xspec.errors import ConfigError
from xspec.progress import Progress
from xspec.server.serve import serve

TESTS = Path(__file__).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Process:
    """`serve` as a task of this process, with a client."""

    def __init__(self, http: aiohttp.ClientSession, engine: FakeEngine, **flags: Any) -> None:
        self.engine = engine
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = http
        self.loaded = asyncio.Event()
        self.stages: list[str] = []
        config = Config.from_mapping({"port": self.port, **flags})
        self.task = asyncio.create_task(serve(config, self._progress, build=self._build))

    def _progress(self, stage: str, done: int, total: int) -> None:
        self.stages.append(stage)

    async def _build(self, config: Config, progress: Progress) -> Any:
        progress("loading weights", 1, 2)
        await self.loaded.wait()
        return self.engine

    async def health(self) -> tuple[int, str]:
        async with self.http.get(self.url + "/health") as response:
            return response.status, (await response.json())["phase"]

    async def reaches(self, status: int, phase: str) -> None:
        async with asyncio.timeout(5):
            while True:
                try:
                    if await self.health() == (status, phase):
                        return
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.005)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_it_listens_while_loading_serves_and_leaves_with_zero() -> None:
    async with aiohttp.ClientSession() as http:
        process = Process(http, FakeEngine())
        await process.reaches(503, "loading")
        assert process.stages == ["loading weights"]
        async with http.post(process.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 503
            assert "loading weights (1/2)" in (await response.json())["error"]["message"]
        assert gc.get_freeze_count() == 0
        process.loaded.set()
        await process.reaches(200, "ready")
        assert gc.get_freeze_count() > 10_000, "full collections must not walk what loading made"
        async with http.post(process.url + "/v1/completions", json={"prompt": "x"}) as response:
            assert response.status == 200
        terminate()
        assert await asyncio.wait_for(process.task, 5) == 0
        assert gc.get_freeze_count() == 0
        assert process.engine.was_closed
        with pytest.raises(aiohttp.ClientConnectionError):
            await process.health()


async def test_a_signal_lets_running_work_finish_and_refuses_new_work() -> None:
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    async with aiohttp.ClientSession() as http:
        process = Process(http, FakeEngine(Script(delay_s=0.005)), shutdown_timeout_s=20)
        process.loaded.set()
        await process.reaches(200, "ready")
        body = {"prompt": "x" * 50, "max_tokens": 52, "stream": True}
        async with http.post(process.url + "/v1/completions", json=body) as response:
            await response.content.readline()
            terminate()
            await process.reaches(503, "draining")
            async with http.post(process.url + "/v1/completions", json={"prompt": "x"}) as refused:
                assert refused.status == 503 and refused.headers["Retry-After"] == "5"
            rest = (await response.read()).decode()
        assert rest.endswith('"finish_reason":"stop","stop_reason":null}]}\n\ndata: [DONE]\n\n')
        assert await asyncio.wait_for(process.task, 5) == 0
        assert process.engine.calls[0].completed and len(process.engine.calls) == 1
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers


async def test_work_that_takes_too_long_is_aborted_and_told() -> None:
    async with aiohttp.ClientSession() as http:
        process = Process(http, FakeEngine(Script(delay_s=0.02)), shutdown_timeout_s=0.1)
        process.loaded.set()
        await process.reaches(200, "ready")
        body = {"prompt": "x" * 200, "max_tokens": 202}
        request = asyncio.create_task(http.post(process.url + "/v1/completions", json=body))
        while not process.engine.calls:
            await asyncio.sleep(0.005)
        terminate()
        response = await request
        assert response.status == 503 and "shutting down" in await response.text()
        assert await asyncio.wait_for(process.task, 5) == 0
        assert not process.engine.calls[0].completed


async def test_a_signal_while_loading_ends_it_with_zero() -> None:
    async with aiohttp.ClientSession() as http:
        process = Process(http, FakeEngine())
        await process.reaches(503, "loading")
        terminate()
        assert await asyncio.wait_for(process.task, 5) == 0


async def test_a_signal_interrupts_the_thread_that_loads() -> None:
    steps: list[int] = []
    let_go = threading.Event()

    def load(progress: Progress) -> None:
        for step in range(100):
            progress("warming", step, 100)
            steps.append(step)
            let_go.wait(5)

    async def build(config: Config, progress: Progress) -> Any:
        working = asyncio.get_running_loop().run_in_executor(None, load, progress)
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            let_go.set()
            await working  # as an engine's threads are waited for
            raise

    task = asyncio.create_task(serve(Config.from_mapping({"port": free_port()}), build=build))
    async with asyncio.timeout(5):
        while not steps:
            await asyncio.sleep(0.005)
        terminate()
        assert await task == 0
    assert steps == [0]


async def test_a_build_that_fails_and_a_port_that_is_taken_say_so() -> None:
    async def fails(config: Config, progress: Progress) -> Any:
        raise ConfigError("--model=/nowhere: no such directory")

    port = free_port()
    with pytest.raises(ConfigError, match="--model=/nowhere"):
        await serve(Config.from_mapping({"port": port}), build=fails)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port={port}: cannot listen there"):
            await serve(Config.from_mapping({"port": port}), build=fails)


PROGRAM = """
import asyncio, sys
sys.path[:0] = [{root!r}, {tests!r}]
from server_fake import FakeEngine, Script
from xspec.config import Config
from xspec.server.serve import serve

async def build(config, progress):
    return FakeEngine(Script(delay_s=0.05))

sys.exit(asyncio.run(serve(Config.from_mapping({{"port": {port}, "shutdown_timeout_s": 60}}), build=build)))
"""


@pytest.mark.parametrize("second", [False, True])
async def test_a_second_signal_ends_the_process_at_once(second: bool) -> None:
    port = free_port()
    program = PROGRAM.format(root=str(TESTS.parent), tests=str(TESTS), port=port)
    child = subprocess.Popen([sys.executable, "-c", program])
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession() as http, asyncio.timeout(40):
            while True:
                try:
                    async with http.get(url + "/health") as response:
                        if response.status == 200:
                            break
                except aiohttp.ClientConnectionError:
                    pass
                await asyncio.sleep(0.05)
            tokens = 200 if second else 4
            body = {"prompt": "x" * tokens, "max_tokens": tokens, "stream": True}
            async with http.post(url + "/v1/completions", json=body) as response:
                await response.content.readline()
                child.send_signal(signal.SIGINT)
                if second:
                    await asyncio.sleep(0.2)
                    assert child.poll() is None, "the first signal waits for running work"
                    began = time.monotonic()
                    child.send_signal(signal.SIGINT)
                    assert await asyncio.to_thread(child.wait, 5) == -signal.SIGINT
                    assert time.monotonic() - began < 2
                else:
                    assert (await response.read()).endswith(b"data: [DONE]\n\n")
                    assert await asyncio.to_thread(child.wait, 10) == 0
    finally:
        child.kill()
        child.wait()


def test_the_server_needs_no_torch() -> None:
    code = "import sys, xspec.server.serve; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=TESTS.parent, timeout=60).returncode == 0
