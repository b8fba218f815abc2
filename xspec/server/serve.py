"""The serving process: listen at once, build the engine behind it, leave in order.

First SIGTERM or SIGINT: no new work, running work finishes within shutdown_timeout_s. A second one
ends the process at once, whatever it is doing.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager

from aiohttp import web

from xspec.config import Config, ServiceConfig
from xspec.engine.api import Engine
from xspec.errors import ConfigError
from xspec.progress import Progress, silent
from xspec.server.app import make_app, make_runner
from xspec.server.handle import EngineHandle, ServiceSettings

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)
WRITE_OUT_S = 5.0
"""After the engine is done, slow readers get this long to take the rest of their answers."""

Build = Callable[[Config, Progress], Awaitable[Engine]]


def service_settings(service: ServiceConfig) -> ServiceSettings:
    return ServiceSettings(
        api_key=service.api_key,
        cors_allow_origins=service.cors_allow_origins,
        cors_allow_methods=service.cors_allow_methods,
        cors_allow_headers=service.cors_allow_headers,
        max_request_body_bytes=service.max_request_body_bytes,
        max_concurrent_requests=service.max_concurrent_requests,
    )


async def serve(config: Config, progress: Progress = silent, *, build: Build | None = None) -> int:
    """Run until a signal; the exit code. `build` is for tests; the default loads the real engine.

    ConfigError (a wrong model, a taken port) propagates: there is nothing to serve.
    """
    service = config.service
    handle = EngineHandle()

    def report(stage: str, done: int, total: int) -> None:
        if stop.is_set():  # on the building thread, which nothing else can interrupt
            raise InterruptedError("stopped while loading")
        handle.progress(stage, done, total)
        progress(stage, done, total)

    runner = make_runner(make_app(handle, service_settings(service)))
    stop = asyncio.Event()
    with _stopped_by_signals(stop):
        async with _listening(runner, service) as address:
            log.info("listening on %s, loading the model", address)
            engine = await _built_unless_stopped(_build(build, config, report), stop)
            if engine is None:  # nothing runs yet, so there is nothing to finish
                return 0
            try:
                with _frozen_heap():
                    handle.engine = engine
                    log.info("ready: %s on %s", engine.model_id, address)
                    await stop.wait()
                    await _drain(handle, engine, service.shutdown_timeout_s)
            finally:
                await engine.close()
    return 0


async def _build(build: Build | None, config: Config, progress: Progress) -> Engine:
    if build is not None:
        return await build(config, progress)
    # Imported late and on another thread: it brings torch, and /health answers meanwhile.
    root = await asyncio.to_thread(importlib.import_module, "xspec.engine.build")
    engine: Engine = await root.build_engine(config, progress=progress)
    return engine


async def _built_unless_stopped(
    build: Coroutine[object, object, Engine], stop: asyncio.Event
) -> Engine | None:
    """The engine, or None when a signal came first."""
    building = asyncio.create_task(build)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((building, stopping), return_when=asyncio.FIRST_COMPLETED)
        if building.done() and not (stop.is_set() and building.exception()):
            return building.result()
        log.info("stopped while loading")
        return None
    finally:
        stopping.cancel()
        building.cancel()
        await asyncio.gather(stopping, building, return_exceptions=True)


async def _drain(handle: EngineHandle, engine: Engine, timeout_s: float) -> None:
    handle.draining = True
    log.info("shutting down: %d requests may finish within %g s", handle.active, timeout_s)
    if not await engine.drain(timeout_s):
        log.warning("time is up: the remaining requests were aborted")
    if not await handle.all_answered(WRITE_OUT_S):
        log.warning("%d clients did not take their answers in time", handle.active)


@contextmanager
def _frozen_heap() -> Iterator[None]:
    """What loading made stays for good: a full collection that walked it would stop rounds for 0.1 s."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@asynccontextmanager
async def _listening(runner: web.AppRunner, service: ServiceConfig) -> AsyncIterator[str]:
    """The open port, as a URL."""
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, service.host, service.port).start()
        except OSError as error:
            raise ConfigError(
                f"--host={service.host} --port={service.port}: cannot listen there: {error.strerror or error}"
            ) from error
        host, port = runner.addresses[0][:2]
        yield f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@contextmanager
def _stopped_by_signals(stop: asyncio.Event) -> Iterator[None]:
    """The first signal sets `stop` and gives signals their default back, so the second one kills."""
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def release(action: Callable[[signal.Signals], object]) -> None:
        for number in SIGNALS:
            loop.remove_signal_handler(number)
            action(number)

    def on_signal() -> None:
        stop.set()
        release(lambda number: signal.signal(number, signal.SIG_DFL))

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal)
    try:
        yield
    finally:
        release(lambda number: signal.signal(number, before[number]))
