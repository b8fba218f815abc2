"""Everything around generation: models, health, metrics, version, server_info, tokenize, detokenize."""

from __future__ import annotations

import time

from aiohttp import web

import xspec
from xspec.engine.api import Phase
from xspec.server.answers import json_response
from xspec.server.bodies import read_body
from xspec.server.handle import HANDLE
from xspec.server.problems import unknown_model
from xspec.server.prompts import INLINE_CHARS, encode_chat, run_sized
from xspec.server.schema import parse_detokenize, parse_tokenize


def _model_entry(request: web.Request) -> dict[str, object]:
    handle = request.app[HANDLE]
    engine = handle.ready()
    created = int(handle.started_s)
    permission = {
        "id": f"modelperm-{engine.model_id}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    return {
        "id": engine.model_id,
        "object": "model",
        "created": created,
        "owned_by": "xspec",
        "root": engine.model_id,
        "parent": None,
        "max_model_len": engine.max_model_len,
        "permission": [permission],
    }


async def models(request: web.Request) -> web.Response:
    return json_response({"object": "list", "data": [_model_entry(request)]})


async def model(request: web.Request) -> web.Response:
    entry = _model_entry(request)
    wanted = request.match_info["model"]
    if wanted != entry["id"]:
        raise unknown_model(wanted, str(entry["id"]))
    return json_response(entry)


async def health(request: web.Request) -> web.Response:
    """200 only when a request would be served."""
    handle = request.app[HANDLE]
    phase = handle.phase
    body: dict[str, object] = {"status": "ok" if phase is Phase.READY else "unavailable", "phase": str(phase)}
    if phase is Phase.READY:
        return json_response(body)
    if detail := handle.detail:
        body["detail"] = detail
    return json_response(body, status=503)


async def metrics(request: web.Request) -> web.Response:
    """Available as long as there is an engine, also while it drains or after it died."""
    engine = request.app[HANDLE].engine
    if engine is None:
        return json_response({"status": "unavailable", "phase": str(request.app[HANDLE].phase)}, status=503)
    body, content_type = engine.metrics.render()
    return web.Response(body=body, headers={"Content-Type": content_type})


async def version(request: web.Request) -> web.Response:
    return json_response({"version": xspec.__version__})


async def ping(request: web.Request) -> web.Response:
    return await health(request)


async def server_info(request: web.Request) -> web.Response:
    handle = request.app[HANDLE]
    info: dict[str, object] = {
        "version": xspec.__version__,
        "phase": str(handle.phase),
        "uptime_s": round(time.time() - handle.started_s, 3),
        "http_requests_active": handle.active,
    }
    if handle.engine is not None:
        info = {"model": handle.engine.model_id, "max_model_len": handle.engine.max_model_len, **info}
        info["engine"] = handle.engine.server_info()
    return json_response(info)


async def tokenize(request: web.Request) -> web.Response:
    engine = request.app[HANDLE].ready()
    body = await read_body(request, engine, parse_tokenize)
    tokenizer = engine.text.tokenizer
    source = body.source
    if isinstance(source, str):
        ids = await run_sized(
            lambda: tuple(tokenizer.encode(source, add_special_tokens=body.add_special_tokens)),
            len(source),
            INLINE_CHARS,
        )
    else:
        ids = await encode_chat(engine, source, body.add_special_tokens)
    strings = [tokenizer.piece(token) or "" for token in ids] if body.return_token_strs else None
    return json_response(
        {"count": len(ids), "max_model_len": engine.max_model_len, "tokens": ids, "token_strs": strings}
    )


async def detokenize(request: web.Request) -> web.Response:
    engine = request.app[HANDLE].ready()
    tokenizer = engine.text.tokenizer
    body = await read_body(request, engine, lambda fields: parse_detokenize(fields, tokenizer.vocab_size))
    text = await run_sized(
        lambda: tokenizer.decode(body.tokens, skip_special_tokens=False), len(body.tokens), INLINE_CHARS
    )
    return json_response({"prompt": text})
