"""The HTTP face as plain ASGI: routes, keys, limits, errors. No Ray here."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from .answers import as_json, event
from .faults import ApiFault, invalid
from .schema import ChatRequest, CompletionRequest, read_request
from .service import Service

LOG = logging.getLogger(__name__)
Handler = Callable[[Request], Awaitable[Response]]
Value = TypeVar("Value")
GONE = 499  # nobody reads it


@dataclass(frozen=True, slots=True)
class Guard:
    """Who may ask, and how much at once. keys: SHA-256 of each key, so that no key is kept; none: all may."""

    keys: tuple[bytes, ...]
    body_bytes: int

    def check_key(self, request: Request) -> None:
        """Raises: ApiFault 401."""
        if not self.keys:
            return
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        given = hashlib.sha256(key.strip().encode()).digest()
        # All are compared, so that the time tells nothing.
        known = [hmac.compare_digest(given, one) for one in self.keys]
        if scheme.lower() != "bearer" or not any(known):
            raise ApiFault(
                401, "a key of this server is needed: Authorization: Bearer KEY", code="invalid_api_key"
            )

    async def read(self, request: Request) -> object:
        """The body's JSON. Raises: ApiFault 413 or 400."""
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self.body_bytes:
            raise self._too_large(int(declared))
        body = bytearray()
        async for part in request.stream():
            body += part
            if len(body) > self.body_bytes:
                raise self._too_large(len(body))
        try:
            return json.loads(bytes(body), parse_constant=_no_number)
        except (ValueError, RecursionError) as error:
            raise invalid(f"the body is not JSON in UTF-8: {error}") from None

    def _too_large(self, size: int) -> ApiFault:
        return ApiFault(
            413,
            f"the body has {size} bytes or more, {self.body_bytes} are taken: send fewer prompts at a time",
        )


def make_app(service: Service, guard: Guard) -> Starlette:
    """The application of one model."""

    async def completions(request: Request) -> Response:
        return await _answer(request, service, read_request(CompletionRequest, await guard.read(request)))

    async def chat(request: Request) -> Response:
        return await _answer(request, service, read_request(ChatRequest, await guard.read(request)))

    async def models(request: Request) -> Response:
        return _json({"object": "list", "data": [service.served.model()]})

    async def model(request: Request) -> Response:
        name = request.path_params["name"]
        if name != service.served.name:
            raise ApiFault(404, f"there is no model {name!r} here", param="model", code="model_not_found")
        return _json(service.served.model())

    async def health(request: Request) -> Response:
        if not service.bridge.is_alive:
            raise ApiFault(503, "the bridge to the pool has ended")
        return _json({"status": "alive"})

    async def ready(request: Request) -> Response:
        if trouble := service.bridge.trouble:
            raise ApiFault(503, f"the pool is not there: {trouble}", code="pool_down")
        return _json({"status": "ready"})

    return Starlette(
        routes=[
            Route("/v1/completions", _guarded(completions, guard), methods=["POST"]),
            Route("/v1/chat/completions", _guarded(chat, guard), methods=["POST"]),
            Route("/v1/models", _guarded(models, guard), methods=["GET"]),
            Route("/v1/models/{name:path}", _guarded(model, guard), methods=["GET"]),
            Route("/health", _guarded(health, None), methods=["GET"]),
            Route("/ready", _guarded(ready, None), methods=["GET"]),
        ],
        exception_handlers={HTTPException: _not_here},
    )


def _guarded(handler: Handler, guard: Guard | None) -> Handler:
    """Check the key, and turn whatever goes wrong into an error object without inner details."""

    async def guarded(request: Request) -> Response:
        try:
            if guard is not None:
                guard.check_key(request)
            return await handler(request)
        except ApiFault as fault:
            return _fault(fault)
        except ClientDisconnect:
            return Response(status_code=GONE)
        except Exception:
            LOG.exception("a request to %s ended in a defect", request.url.path)
            return _fault(ApiFault(500, "the server made a mistake: its log says more"))

    return guarded


async def _answer(request: Request, service: Service, body: CompletionRequest | ChatRequest) -> Response:
    if not body.stream:
        return _json(await _while_there(request, service.whole(body)))
    events = service.stream(body)
    # What is refused or fails before the first event still has a status code of its own.
    first = await _while_there(request, anext(events))
    return StreamingResponse(
        _events(first, events), media_type="text/event-stream", headers={"cache-control": "no-store"}
    )


async def _events(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Events of a stream that has begun; a failure is its last event."""
    try:
        yield first
        async for one in rest:
            yield one
    except ApiFault as fault:
        yield event(fault.body)
    except Exception:
        LOG.exception("a stream ended in a defect")
        yield event(ApiFault(500, "the server made a mistake: its log says more").body)
    finally:
        # Leaves what the pool still does for it.
        await rest.aclose()  # type: ignore[attr-defined]


async def _while_there(request: Request, work: Awaitable[Value]) -> Value:
    """Wait for work as long as the client does. Raises: ClientDisconnect."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        await _ended([task, gone])


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _ended(tasks: Sequence[asyncio.Future[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _not_here(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    return _fault(ApiFault(status, f"there is no {request.method} {request.url.path} here", code="not_found"))


def _json(body: dict[str, Any]) -> Response:
    return Response(as_json(body), media_type="application/json")


def _fault(fault: ApiFault) -> Response:
    return Response(
        as_json(fault.body), status_code=fault.status, media_type="application/json", headers=fault.headers
    )


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")
