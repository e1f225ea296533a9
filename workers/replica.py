"""The Ray actor around one engine thread: it answers health during a forward and never fails to start."""

from __future__ import annotations

import asyncio
import os
from collections import OrderedDict
from typing import Any

import numpy as np
import ray

from .engine_thread import EngineThread
from .executor import WindowTokens
from .messages import decode_command, encode_ack, encode_inventory, encode_result
from .model import ReplicaSettings
from .status import encode_status

WINDOWS_KEPT = 3
NO_ITEMS = WindowTokens(np.empty(0, np.int32), np.zeros(1, np.int64), np.empty(0, np.int32))


class Replica:
    """One process, one model. The control group reads snapshots and never waits for the engine."""

    def __init__(self, settings: ReplicaSettings, hide_gpus: bool) -> None:
        if hide_gpus:
            # Ray no longer hides the GPUs of an actor that asked for none; the engine opens the driver only
            # later.
            os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._windows: OrderedDict[str, WindowTokens] = OrderedDict()
        self._engine = EngineThread(settings)

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

    async def inventory(self) -> bytes:
        """Begin a new epoch and say what is held at its start."""
        return encode_inventory(await asyncio.wrap_future(self._engine.inventory()))

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

    async def _window(self, name: str, reference: list[Any]) -> WindowTokens:
        if name not in self._windows:
            token_ids, offsets, n_scored = await reference[0]
            # Views, since an array from the object store has a dtype equal to int32 but not the one object
            # that the engine asks for.
            self._windows[name] = WindowTokens(
                token_ids.view(np.int32), offsets.view(np.int64), n_scored.view(np.int32)
            )
            while len(self._windows) > WINDOWS_KEPT:
                self._windows.popitem(last=False)
        self._windows.move_to_end(name)
        return self._windows[name]


REPLICA_OPTIONS: dict[str, Any] = {
    "max_restarts": 0,
    "max_task_retries": 0,
    "concurrency_groups": {"control": 8},
}
