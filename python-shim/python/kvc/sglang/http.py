"""What the engine's patched HTTP server calls: the turn header, batch items, session_params, and at its start the
module's routes and the drain on SIGTERM.

Runs in the server's own process; the module's listener is reached at `server_args.kvc_listen`.
"""

import os
from collections.abc import Mapping
from typing import Any

TURN_HEADER = "x-kvc-turn"
ROUTING_KEY = TURN_HEADER + ": "
"""Marks a routing key that is a turn header; any other routing key is the engine's own."""
PROXY_SECONDS = 5.0
SESSION_PARAMS = ("id", "rid", "offset", "replace", "drop_previous_output")


def routing_key(headers: Mapping[str, str]) -> str | None:
    """The routing key of a request: its turn header, else the engine's own header."""
    tag = headers.get(TURN_HEADER)
    return headers.get("x-smg-routing-key") if tag is None else ROUTING_KEY + tag


def check_session_params(params: Any) -> None:
    """Raises `ValueError`, which the client sees as status 400."""
    if not isinstance(params, dict):
        raise ValueError(f"bad-request: session_params must be an object, got {type(params).__name__}")
    for name in params:
        if name not in SESSION_PARAMS:
            raise ValueError(f"bad-request: session_params.{name} is unknown, known are {', '.join(SESSION_PARAMS)}")
    if params.get("id") is not None and not isinstance(params["id"], str):
        raise ValueError(f"bad-request: session_params.id must be a string, got {type(params['id']).__name__}")


def batch_item(obj: Any, i: int) -> dict[str, Any]:
    """Of the items of a batch that name one session only the first holds it; the others run plain (ADM-8)."""
    params = obj.session_params
    if isinstance(params, list):
        check = params[i] if i < len(params) else None
        if check is not None:
            check_session_params(check)
        earlier = [p.get("id") for p in params[:i] if isinstance(p, dict)]
        params = None if check is None or check.get("id") in earlier else check
    elif i > 0:
        params = None
    return {"session_params": params, "routing_key": obj.routing_key if i == 0 else None}


def install(app: Any, manager: Any) -> None:
    """When the server starts: adds the routes, and the drain before a shutdown."""
    from fastapi import Request
    from sglang.srt.managers.io_struct import GenerateReqInput

    from kvc._native import settings
    from kvc.sglang import args, shutdown

    GenerateReqInput.kvc_item = batch_item
    shutdown.install(manager, int(settings(args.flags_of(manager.server_args))["drain_ms"]))
    listener = f"http://{manager.server_args.kvc_listen}"

    async def info() -> Any:
        return await _forward("GET", listener + "/kvc/v1/info", None)

    async def admit(request: Request) -> Any:
        return await _forward("POST", listener + "/admit_direct_append", await request.body())

    app.add_api_route("/kvc/v1/info", info, methods=["GET"])
    app.add_api_route("/admit_direct_append", admit, methods=["POST"])
    if os.environ.get("KVC_TEST") == "1":
        from kvc.sglang import testing

        testing.install(app, manager)


async def _forward(method: str, url: str, body: bytes | None) -> Any:
    """Passes a request to the module's listener and its answer back, byte for byte."""
    import aiohttp
    from fastapi import Response

    timeout = aiohttp.ClientTimeout(total=PROXY_SECONDS)
    headers = {"content-type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.request(method, url, data=body, headers=headers) as answer,
        ):
            return Response(await answer.read(), answer.status, media_type="application/json")
    except (aiohttp.ClientError, TimeoutError):
        text = '{"error":{"code":"internal","message":"the module\'s listener does not answer"}}'
        return Response(text, 502, media_type="application/json")
