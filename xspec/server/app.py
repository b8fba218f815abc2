"""The web application: routes and the rules around every handler (ids, errors, CORS, keys).

Middlewares run in this order: errors (outermost), CORS preflights, key. Headers that every response
carries, streams included, are added when a response is prepared.
"""

from __future__ import annotations

import hmac
import logging
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from xspec.server import admin
from xspec.server.chat import chat_completions
from xspec.server.completions import completions
from xspec.server.handle import HANDLE, REQUEST_ID, SETTINGS, EngineHandle, ServiceSettings
from xspec.server.problems import internal, problem_of, unauthorised
from xspec.server.schema import acceptable_id

log = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

OPEN_PATHS = frozenset(("/health", "/ping", "/metrics", "/version"))
"""What probes and scrapers read; everything else asks for the key, unknown paths included."""

PREFLIGHT_MAX_AGE_S = 600
_ID_HEADER = "X-Request-Id"


def make_app(handle: EngineHandle, settings: ServiceSettings) -> web.Application:
    app = web.Application(
        client_max_size=settings.max_request_body_bytes, middlewares=[_errors, _preflight, _key]
    )
    app[HANDLE] = handle
    app[SETTINGS] = settings
    app.on_response_prepare.append(_common_headers)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    app.router.add_get("/v1/models", admin.models)
    # Model ids may hold slashes.
    app.router.add_get("/v1/models/{model:.+}", admin.model)
    app.router.add_get("/health", admin.health)
    app.router.add_get("/ping", admin.ping)
    app.router.add_get("/metrics", admin.metrics)
    app.router.add_get("/version", admin.version)
    app.router.add_get("/server_info", admin.server_info)
    app.router.add_post("/tokenize", admin.tokenize)
    app.router.add_post("/detokenize", admin.detokenize)
    return app


def make_runner(app: web.Application) -> web.AppRunner:
    """Handlers are cancelled when their client disconnects: that is what frees its pages.

    Bodies are not decompressed: `bodies.py` refuses encoded ones, so none can blow up in memory.
    """
    protocol_log = logging.getLogger(f"{__name__}.protocol")
    protocol_log.addFilter(_is_ours)
    return web.AppRunner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        shutdown_timeout=1.0,
        logger=protocol_log,
    )


def _is_ours(record: logging.LogRecord) -> bool:
    """Malformed HTTP is the client's mistake and gets its 400: a traceback each would only fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, HttpProcessingError):
        return True
    log.debug("malformed HTTP: %s", error.message)
    return False


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    wanted = request.headers.get(_ID_HEADER, "")
    request[REQUEST_ID] = wanted if acceptable_id(wanted) else uuid.uuid4().hex
    try:
        return await handler(request)
    except ConnectionError:
        raise  # the client is gone
    except Exception as error:
        problem = problem_of(error)
        if problem is None:
            log.exception("%s %s failed", request.method, request.path)
            problem = internal()
        return problem.response()


@web.middleware
async def _preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    settings = request.app[SETTINGS]
    asked = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
    if not asked or not settings.cors_allow_origins:
        return await handler(request)
    return web.Response(
        status=204,
        headers={
            "Access-Control-Allow-Methods": ", ".join(settings.cors_allow_methods),
            "Access-Control-Allow-Headers": ", ".join(settings.cors_allow_headers),
            "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
        },
    )


@web.middleware
async def _key(request: web.Request, handler: Handler) -> web.StreamResponse:
    expected = request.app[SETTINGS].api_key
    if expected and request.path not in OPEN_PATHS:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        # surrogateescape: a header may hold any bytes
        sent = key.strip().encode(errors="surrogateescape")
        if scheme.lower() != "bearer" or not hmac.compare_digest(sent, expected.encode()):
            return unauthorised().response()
    return await handler(request)


async def _common_headers(request: web.Request, response: web.StreamResponse) -> None:
    if (request_id := request.get(REQUEST_ID)) is not None:  # aiohttp refuses some before any middleware
        response.headers[_ID_HEADER] = request_id
    allowed = request.app[SETTINGS].cors_allow_origins
    if not allowed:
        return
    response.headers["Vary"] = "Origin"
    origin = request.headers.get("Origin")
    if origin is not None and ("*" in allowed or origin in allowed):
        response.headers["Access-Control-Allow-Origin"] = "*" if "*" in allowed else origin
        response.headers["Access-Control-Expose-Headers"] = _ID_HEADER
