"""From an HTTP request to a checked body: media type, size, JSON, model name.

Knows nothing about the fields beyond `model`; the parser it is given does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import orjson
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from xspec.engine.api import Engine
from xspec.server.handle import SETTINGS
from xspec.server.problems import bad_request, unknown_model
from xspec.server.prompts import run_sized

INLINE_BYTES = 32 * 1024

T = TypeVar("T")


async def read_body(request: web.Request, engine: Engine, parse: Callable[[Mapping[str, Any]], T]) -> T:
    """The parsed body; ProblemError or RequestError say what is wrong with it."""
    _check_media_type(request)
    raw = await _read(request)

    def work() -> T:
        return parse(_object(raw, engine.model_id))

    return await run_sized(work, len(raw), INLINE_BYTES)


def _check_media_type(request: web.Request) -> None:
    # A body without a type is refused too: browsers may send one across sites without asking.
    kind = request.content_type if "Content-Type" in request.headers else "none"
    if kind != "application/json":
        raise bad_request(f"Content-Type must be application/json, found {kind[:80]}.", status=415)
    charset = (request.charset or "utf-8").lower()
    if charset not in ("utf-8", "utf8", "us-ascii"):
        raise bad_request(f"The charset must be utf-8, found {charset[:80]}.", status=415)
    encoding = request.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise bad_request(f"Bodies must not be encoded, found Content-Encoding {encoding[:80]}.", status=415)


async def _read(request: web.Request) -> bytes:
    limit = request.app[SETTINGS].max_request_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise web.HTTPRequestEntityTooLarge(max_size=limit, actual_size=request.content_length)
    try:
        return await request.read()
    except (web.RequestPayloadError, HttpProcessingError) as error:
        raise bad_request(f"The body cannot be read: {str(error)[:200]}") from None


def _object(raw: bytes, model_id: str) -> dict[str, Any]:
    if not raw.strip():
        raise bad_request("The body is empty; a JSON object is needed.")
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise bad_request(f"The body is not valid JSON: {error}") from None
    if type(body) is not dict:
        raise bad_request(f"The body must be a JSON object, found {type(body).__name__}.")
    model = body.get("model")
    if type(model) is str and model != model_id:
        raise unknown_model(model, model_id)
    return body
