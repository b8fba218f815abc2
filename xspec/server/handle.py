"""What every handler shares: the engine as far as it exists, and the service's settings.

The server listens before the engine is built, so all handlers go through EngineHandle, which knows
whether there is an engine, why not, and how many requests are still being answered.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from aiohttp import web

from xspec.engine.api import Engine, Phase
from xspec.server.problems import UnavailableError


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """The part of the configuration that HTTP depends on. Empty api_key or origins switch a rule off."""

    api_key: str = ""
    cors_allow_origins: tuple[str, ...] = ()
    cors_allow_methods: tuple[str, ...] = ("GET", "POST", "OPTIONS")
    cors_allow_headers: tuple[str, ...] = ("Authorization", "Content-Type", "X-Request-Id")
    max_request_body_bytes: int = 16 * 1024 * 1024
    max_concurrent_requests: int = 0  # 0: no limit; prompts of one request beyond it can never be admitted


class EngineHandle:
    """The engine on its way from loading to gone. Used on the event loop thread only."""

    def __init__(self, engine: Engine | None = None) -> None:
        self.engine = engine
        self.failure: str | None = None  # why there will be no engine
        self._progress = ""  # what the build was doing last
        self.draining = False
        self.started_s = time.time()
        self.active = 0  # requests being answered
        self._warming = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def phase(self) -> Phase:
        if self.failure is not None:
            return Phase.DEAD
        if self.engine is not None and self.engine.phase is Phase.DEAD:
            return Phase.DEAD
        if self.draining:
            return Phase.DRAINING
        if self.engine is None:
            return Phase.WARMING if self._warming else Phase.LOADING
        return self.engine.phase

    def progress(self, stage: str, done: int, total: int) -> None:
        """A `Progress`; called from any thread while the engine is being built (it only sets values)."""
        self._warming = stage.startswith("warm")
        self._progress = f"{stage} ({done}/{total})" if total else stage

    @property
    def detail(self) -> str:
        """Why there is no engine, or how far its build is; nothing once there was one."""
        return self.failure or (self._progress if self.engine is None else "")

    def ready(self) -> Engine:
        """The engine, or UnavailableError (503) that says what it is waiting for."""
        phase = self.phase
        if self.engine is not None and phase is Phase.READY:
            return self.engine
        raise UnavailableError(phase, self.detail)

    @contextmanager
    def answering(self) -> Iterator[Engine]:
        """A request is being answered: a shutdown waits until its last byte is written."""
        engine = self.ready()
        self.active += 1
        self._idle.clear()
        try:
            yield engine
        finally:
            self.active -= 1
            if not self.active:
                self._idle.set()

    async def all_answered(self, timeout_s: float) -> bool:
        """Whether every answer was written out within the time."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            return False
        return True


HANDLE: web.AppKey[EngineHandle] = web.AppKey("handle", EngineHandle)
SETTINGS: web.AppKey[ServiceSettings] = web.AppKey("settings", ServiceSettings)
REQUEST_ID: web.RequestKey[str] = web.RequestKey("request_id", str)
