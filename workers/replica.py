"""The Ray actor around one engine thread: it answers health during a forward and never fails to start."""

from __future__ import annotations

import asyncio
import os
import time
from collections import OrderedDict
from typing import Any

import numpy as np
import ray

from .effort import grouped_from
from .engine_thread import EngineThread
from .executor import Window, WindowTokens
from .messages import decode_command, encode_ack, encode_inventory, encode_result
from .model import ReplicaSettings
from .outbox import Owner
from .prompts import decode_prompts
from .status import encode_status
from .tokens import encode_tokens

WINDOWS_KEPT = 3
NO_ITEMS = WindowTokens(np.empty(0, np.int32), np.zeros(1, np.int64), np.empty(0, np.int32))
# Ids of all of a client's completions that came within this time travel in one message.
BUNDLE_S = 0.05


class Replica:
    """One process, one model. The control group reads snapshots and never waits for the engine."""

    def __init__(self, settings: ReplicaSettings, hide_gpus: bool) -> None:
        if hide_gpus:
            # Ray no longer hides the GPUs of an actor that asked for none; the engine opens the driver only
            # later.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._windows: OrderedDict[str, Window] = OrderedDict()
        self._engine = EngineThread(settings)
        self._news: dict[str, asyncio.Event] = {}
        self._sent_s: dict[str, float] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    async def run(self, command_bytes: bytes, window: list[Any]) -> tuple[bytes, bytes]:
        """Carry out one command. window: one reference in a list, so that Ray does not fetch it on the way.

        Returns an Ack and a Result. Raises EngineUnfit if the engine broke: the replica must then be
        replaced. A window whose client died, and its ids with it, is refused in its turn: it has no items.
        """
        command = decode_command(command_bytes)
        try:
            tokens = await self._window(command.window, window)
        except ray.exceptions.RayError:
            tokens = NO_ITEMS
        ack, result = await asyncio.wrap_future(self._engine.submit(command, tokens))
        return encode_ack(ack), encode_result(result)

    async def inventory(self, cancel_all: bool = False) -> bytes:
        """Begin a new epoch and say what is held at its start. cancel_all: forget every completion first."""
        return encode_inventory(await asyncio.wrap_future(self._engine.inventory(cancel_all=cancel_all)))

    async def tokens(self, client: str, after: int, timeout_s: float) -> bytes | None:
        """The bundle of generated ids after the one numbered `after`; waits for an id. None: none came.

        A bundle comes again until the client asks for the one after it.
        """
        news = self._news.setdefault(client, asyncio.Event())
        if self._loop is None:
            # That of this method: other concurrency groups have loops of their own.
            self._loop, self._engine.outbox.on_news = asyncio.get_running_loop(), self._tell
        await asyncio.sleep(max(self._sent_s.get(client, 0.0) + BUNDLE_S - time.monotonic(), 0.0))
        news.clear()
        bundle = self._engine.outbox.take(client, after)
        if bundle is None:
            try:
                await asyncio.wait_for(news.wait(), timeout_s)
            except TimeoutError:
                return None
            bundle = self._engine.outbox.take(client, after)
        self._sent_s[client] = time.monotonic()
        return None if bundle is None else encode_tokens(bundle)

    async def cancel(self, owners: list[Owner]) -> None:
        """Forget completions; those that have ended are passed over."""
        self._engine.cancel([(str(client), int(window), int(item)) for client, window, item in owners])

    async def forget(self, client: str) -> None:
        """A client is gone: its completions end, and nothing is kept for it."""
        self._engine.forget(client)
        self._news.pop(client, None)
        self._sent_s.pop(client, None)

    async def until_death(self) -> None:
        """Never returns: its failure is the news that this process is gone."""
        await asyncio.Event().wait()

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def ready(self) -> bytes:
        """The status once loading has ended, well or not."""
        await asyncio.shield(asyncio.wrap_future(self._engine.loaded))
        return encode_status(self._engine.status())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def health(self) -> bytes:
        """The status now."""
        return encode_status(self._engine.status())

    @ray.method(concurrency_group="control")  # type: ignore[untyped-decorator]
    async def drain(self) -> None:
        """Finish what waits and close the model. The owner then ends this process."""
        self._engine.drain()
        await asyncio.shield(asyncio.wrap_future(self._engine.ended))

    def _tell(self, client: str) -> None:
        """Wake whoever waits for ids of a client. Called on the engine's thread."""
        if client in self._news:
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._news[client].set)

    async def _window(self, name: str, reference: list[Any]) -> Window:
        if name not in self._windows:
            self._windows[name] = _window_from(await reference[0])
            while len(self._windows) > WINDOWS_KEPT:
                self._windows.popitem(last=False)
        self._windows.move_to_end(name)
        return self._windows[name]


def _window_from(payload: Any) -> Window:
    """What a client put into the object store: a message of requests, or arrays to score."""
    if isinstance(payload, bytes):
        return decode_prompts(payload)
    if len(payload) > 3:
        return grouped_from(payload)
    token_ids, offsets, n_scored = payload
    # Views, since an array from the object store has a dtype equal to int32 but not the one object that the
    # engine asks for.
    return WindowTokens(token_ids.view(np.int32), offsets.view(np.int64), n_scored.view(np.int32))


REPLICA_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"control": 8},
}
