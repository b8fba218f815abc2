"""Errors as OpenAI clients expect them: a status and {"error": {message, type, param, code}}.

Translates the exception tree; nothing else in the server writes an error body.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import orjson
from aiohttp import web

from xspec.engine.api import Phase
from xspec.errors import EngineDeadError, EngineError, OverloadedError, PromptTooLongError, RequestError

RETRY_AFTER_BUSY_S = 1
RETRY_AFTER_UNAVAILABLE_S = 5


class UnavailableError(Exception):
    """No engine is ready: still loading, draining or dead."""

    def __init__(self, phase: Phase, detail: str = "") -> None:
        self.phase = phase
        state = {
            Phase.DRAINING: "the server is shutting down and takes no new requests",
            Phase.DEAD: "the engine has failed; the server must be restarted",
            Phase.LOADING: "the model is still loading",
            Phase.WARMING: "the model is warming up",
            Phase.READY: "the engine is not ready",
        }[phase]
        super().__init__(f"{state}: {detail}" if detail else state)


@dataclass(frozen=True, slots=True)
class Problem:
    """One error, ready to be written."""

    status: int
    message: str
    type: str
    param: str | None = None
    code: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def response(self) -> web.Response:
        return web.Response(
            body=orjson.dumps(self.body),
            status=self.status,
            headers=self.headers,
            content_type="application/json",
        )


class ProblemError(Exception):
    """A handler answers with exactly this problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(problem.message)


def bad_request(message: str, param: str | None = None, *, status: int = 400) -> ProblemError:
    return ProblemError(Problem(status, message, "invalid_request_error", param))


def unknown_model(name: str, served: str) -> ProblemError:
    message = f"The model {name[:200]!r} does not exist; this server serves {served!r}."
    return ProblemError(Problem(404, message, "invalid_request_error", "model", "model_not_found"))


def unauthorised() -> Problem:
    return Problem(
        401,
        "A valid API key is required: send it as 'Authorization: Bearer <key>'.",
        "invalid_request_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def problem_of(error: Exception) -> Problem | None:
    """The problem an exception stands for; None when it is nothing the server raises on purpose."""
    match error:
        case ProblemError():
            return error.problem
        case UnavailableError():
            return _unavailable(str(error))
        case OverloadedError(draining=True):
            return _unavailable(str(error))
        case OverloadedError():
            return Problem(
                429,
                str(error),
                "rate_limit_error",
                error.param,
                "rate_limit_exceeded",
                {"Retry-After": str(RETRY_AFTER_BUSY_S)},
            )
        case PromptTooLongError():
            return Problem(
                400, str(error), "invalid_request_error", error.param or "prompt", "context_length_exceeded"
            )
        case RequestError():
            return Problem(400, str(error), "invalid_request_error", error.param)
        case EngineDeadError():
            return _unavailable(str(error))
        case EngineError():
            return Problem(500, str(error), "server_error", code="engine_error")
        case web.HTTPException():
            return _http(error)
    return None


def internal() -> Problem:
    return Problem(500, "Internal error; the server's log has the details.", "server_error")


def _unavailable(message: str) -> Problem:
    return Problem(
        503,
        message,
        "server_error",
        code="service_unavailable",
        headers={"Retry-After": str(RETRY_AFTER_UNAVAILABLE_S)},
    )


def _http(error: web.HTTPException) -> Problem:
    """aiohttp's own refusals (routing, body size) in the house's shape."""
    match error:
        case web.HTTPNotFound():
            return Problem(404, "There is nothing at this path.", "invalid_request_error", code="not_found")
        case web.HTTPMethodNotAllowed():
            allowed = ", ".join(sorted(error.allowed_methods))
            message = f"The method {error.method} is not allowed here; allowed: {allowed}."
            return Problem(405, message, "invalid_request_error", headers={"Allow": allowed})
        case web.HTTPRequestEntityTooLarge():
            message = "The request body is larger than this server accepts."
            return Problem(413, message, "invalid_request_error")
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    return Problem(error.status, error.reason or "", kind)
