"""The one thread that makes, uses and closes a model. Everybody else sends it commands and reads snapshots.

Invariant: every command submitted gets exactly one answer, a refusal included, unless the engine breaks; then
every command that waits fails with EngineUnfit and the replica must be replaced.

Order: commands are carried out by (epoch, sequence), whatever they ask for. A command to generate is carried
out, and answered, once its prefixes are built and its requests have joined the running batch; their ids come
afterwards, in slices of SLICE_S between commands. The batch stands still while a command runs and goes on
where it was, to the same bits. After a command it has the thread for as long as that took, a slice at least
and TURN_S at most, and whenever no command is next. So a command waits for others before it and for at most
TURN_S and a step, and under constant scoring the batch has half of the time.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from .executor import Executor, Window
from .gpu_memory import wait_until_free
from .inbox import GAP_S, Inbox
from .model import ReplicaSettings
from .outbox import Outbox, Owner
from .self_test import self_test
from .status import ModelFacts, State, Status
from .wire import DIGEST_BYTES, Ack, Command, Inventory, Result

INBOX_LIMIT = 8
SLICE_S = 0.02
TURN_S = 0.5
T = TypeVar("T")
_NO_RESULT = Result(
    np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.bool_), np.zeros(1, np.int64), failures=()
)


class EngineUnfit(RuntimeError):
    """The engine of this process is broken: nothing it was asked may be trusted to have happened."""


@dataclass(frozen=True, slots=True)
class _Ticket:
    command: Command
    window: Window
    answer: Future[tuple[Ack, Result]]


@dataclass(frozen=True, slots=True)
class _Slice:
    """Generate for a while."""


_Inquiry = tuple[int, Future[Inventory]]
_Work = _Ticket | _Inquiry | _Slice


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """What the engine thread last published; read by others without a lock."""

    total_bytes: int = 0
    table: bytes = bytes(DIGEST_BYTES)
    prefixes: int = 0
    memory_bytes: int = 0
    mismatches: int = 0
    commands: int = 0
    generating: int = 0
    generated_tokens: int = 0
    generating_s: float = 0.0


class EngineThread:
    """Owns one model on one thread. Any thread may call; only close waits for a forward."""

    def __init__(self, settings: ReplicaSettings, gap_s: float = GAP_S) -> None:
        self._settings = settings
        self._condition = threading.Condition()
        self._inbox: Inbox[_Ticket] = Inbox(INBOX_LIMIT, gap_s)
        self._inquiries: list[_Inquiry] = []
        self._cancelled: list[Owner] = []
        self._gone: list[str] = []
        self._cancels_all = False
        self._owed_s = 0.0
        self.outbox = Outbox()
        self._state, self._phase, self._message = State.LOADING, "start", ""
        self._facts: ModelFacts | None = None
        self._snapshot = _Snapshot()
        self._step_began_s: float | None = None
        self._beat_s = time.monotonic()
        self.loaded: Future[None] = Future()
        self.ended: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, command: Command, window: Window) -> Future[tuple[Ack, Result]]:
        """Queue one command. The answer may be a refusal; it is an EngineUnfit if the engine breaks."""
        ticket = _Ticket(command, window, _promise())
        with self._condition:
            if self._state in (State.READY, State.LOADING):
                refused = self._inbox.offer(command.epoch, command.sequence, ticket, time.monotonic())
            elif self._state is State.UNFIT:
                ticket.answer.set_exception(EngineUnfit(self._message))
                refused = []
            else:
                refused = [(ticket, f"{self._state}: no new command is taken")]
            self._condition.notify()
        self._refuse(refused)
        return ticket.answer

    def cancel(self, owners: list[Owner]) -> None:
        """Forget requests that are generated for, before the next slice or command."""
        with self._condition:
            self._cancelled += owners
            self._condition.notify()

    def forget(self, client: str) -> None:
        """A client is gone: keep nothing for it, before the next slice or command."""
        with self._condition:
            self._gone.append(client)
            self._condition.notify()

    def inventory(self, *, cancel_all: bool = False) -> Future[Inventory]:
        """Begin a new epoch and list what is held once the running command is done; what waits is refused.

        What is generated goes on, unless cancel_all: then every request is forgotten first.
        """
        answer: Future[Inventory] = _promise()
        with self._condition:
            if self._state not in (State.READY, State.LOADING):
                answer.set_exception(EngineUnfit(f"replica is {self._state}: {self._message}"))
                return answer
            epoch = self._inbox.epoch + 1
            refused = self._inbox.start_epoch(epoch)
            self._inquiries.append((epoch, answer))
            self._cancels_all = self._cancels_all or cancel_all
            self._condition.notify()
        self._refuse(refused)
        return answer

    def status(self) -> Status:
        """A snapshot; touches neither the model nor a lock that is held during a forward."""
        now_s, began_s, snapshot = time.monotonic(), self._step_began_s, self._snapshot
        return Status(
            state=str(self._state),
            phase=self._phase,
            message=self._message,
            pid=os.getpid(),
            host=socket.gethostname(),
            epoch=self._inbox.epoch,
            queued=len(self._inbox),
            commands=snapshot.commands,
            step_age_s=now_s - began_s if began_s is not None else 0.0,
            beat_age_s=now_s - self._beat_s,
            memory_bytes=snapshot.memory_bytes,
            prefixes=snapshot.prefixes,
            prefix_bytes=snapshot.total_bytes,
            prefix_budget_bytes=self._settings.prefix_budget_bytes,
            mismatches=snapshot.mismatches,
            generating=snapshot.generating,
            generated_tokens=snapshot.generated_tokens,
            generating_s=snapshot.generating_s,
            facts=self._facts,
        )

    def drain(self) -> None:
        """Take no new command, answer the ones that wait, close the model, end. `ended` is done then.

        Completions on their way are forgotten: they may be long, and come to the same ids elsewhere.
        """
        with self._condition:
            if self._state in (State.READY, State.LOADING):
                self._state = State.DRAINING
            self._condition.notify()

    def close(self, timeout_s: float) -> bool:
        """Drain and wait. Returns whether the thread ended in time."""
        self.drain()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        executor: Executor | None = None
        try:
            executor = self._load()
            while (work := self._next_work(executor)) is not None:
                self._perform(executor, work)
            executor.close()
            self._finish(State.CLOSED, "")
        except (
            BaseException
        ) as error:  # the thread's end is the only place that learns of an exception nobody expected
            self._fail(error)
        finally:
            self.ended.set_result(None)

    def _load(self) -> Executor:
        if self._settings.load_options.get("device") == "cuda":
            self._phase = "GPU memory"
            self._message = wait_until_free(self._settings.load_options.get("budget_bytes"))
        self._phase = "load"
        model = self._settings.load()
        self._phase = "self-test"
        tested = self_test(model)
        settings = self._settings
        executor = Executor(
            model,
            settings.prefix_budget_bytes,
            self.outbox,
            settings.generation_batch,
            settings.load_options.get("budget_bytes"),
        )
        self._facts = ModelFacts(
            model.digest, model.numerics_id, tested.digest, int(model.max_seq_len), dict(model.descriptor)
        )
        self._publish(executor, 0)
        with self._condition:
            self._phase = "run"
            if self._state is State.LOADING:
                self._state = State.READY
        self.loaded.set_result(None)
        return executor

    def _next_work(self, executor: Executor) -> _Work | None:
        """The next inquiry, command in order or slice; None when drained."""
        while True:
            with self._condition:
                self._beat_s = time.monotonic()
                self._forget_cancelled(executor)
                if self._inquiries:
                    return self._inquiries.pop(0)
                # Read once: a drain that arrives during the wait must not skip what was submitted before it.
                leaving = self._state is State.DRAINING
                generates = bool(len(executor.generating)) and not leaving
                if not (generates and self._owed_s > 0.0):
                    ticket = self._inbox.take()
                    if ticket is not None:
                        return ticket
                refused = self._inbox.overdue(self._beat_s)
                if leaving:
                    refused += self._inbox.end_epoch("draining: the replica is leaving")
                elif not refused and not generates:
                    wait_s = self._inbox.wait_s(self._beat_s)
                    self._condition.wait(1.0 if wait_s is None else min(wait_s, 1.0))
            self._refuse(refused)
            if leaving:
                return None
            if generates:
                return _Slice()

    def _forget_cancelled(self, executor: Executor) -> None:
        if not self._cancelled and not self._cancels_all and not self._gone:
            return
        if self._cancels_all:
            executor.generating.cancel_all()
        executor.generating.cancel(self._cancelled)
        for client in self._gone:
            executor.generating.forget(client)
        self._cancelled, self._gone, self._cancels_all = [], [], False
        self._publish(executor, 0)

    def _perform(self, executor: Executor, work: _Work) -> None:
        self._step_began_s = began_s = time.monotonic()
        if isinstance(work, _Ticket):
            self._execute(executor, work)
            self._owed_s = min(max(time.monotonic() - began_s, SLICE_S), TURN_S)
        elif isinstance(work, _Slice):
            executor.generating.step(SLICE_S)
            self._publish(executor, 0)
            self._owed_s -= time.monotonic() - began_s
        else:
            epoch, inquiry = work
            inquiry.set_result(executor.inventory(epoch))
        self._step_began_s = None

    def _execute(self, executor: Executor, ticket: _Ticket) -> None:
        try:
            ack, result = executor.execute(ticket.command, ticket.window)
        except BaseException as error:
            ticket.answer.set_exception(EngineUnfit(f"{type(error).__name__}: {error}"))
            raise
        self._publish(executor, 1)
        if ack.refused:
            with self._condition:
                current = ticket.command.epoch == self._inbox.epoch
                refused = self._inbox.end_epoch(ack.refused) if current else []
            self._refuse(refused)
        ticket.answer.set_result((ack, result))

    def _publish(self, executor: Executor, num_commands: int) -> None:
        table = executor.table
        self._snapshot = _Snapshot(
            total_bytes=table.total_bytes,
            table=table.table_digest(),
            prefixes=len(table),
            memory_bytes=executor.memory_bytes,
            mismatches=table.mismatches,
            commands=self._snapshot.commands + num_commands,
            generating=len(executor.generating),
            generated_tokens=executor.generating.tokens,
            generating_s=executor.generating.seconds,
        )

    def _refuse(self, refused: list[tuple[_Ticket, str]]) -> None:
        for ticket, reason in refused:
            epoch, sequence = ticket.command.epoch, ticket.command.sequence
            held = self._snapshot
            ack = Ack(epoch, sequence, reason, (), held.total_bytes, held.table, 0, 0.0, 0)
            ticket.answer.set_result((ack, _NO_RESULT))

    def _finish(self, state: State, message: str) -> None:
        with self._condition:
            self._state, self._message = state, message
            if not self.loaded.done():
                self.loaded.set_result(None)

    def _fail(self, error: BaseException) -> None:
        self._finish(State.UNFIT, f"{type(error).__name__}: {error}")
        with self._condition:
            waiting = [ticket for ticket, _ in self._inbox.end_epoch("unfit")]
            inquiries, self._inquiries = self._inquiries, []
        unfit = EngineUnfit(f"engine failed in phase {self._phase}: {self._message}")
        for ticket in waiting:
            ticket.answer.set_exception(unfit)
        for _, inquiry in inquiries:
            inquiry.set_exception(unfit)


def _promise() -> Future[T]:
    """A future that its receiver cannot cancel: the engine thread must always be able to answer."""
    promise: Future[T] = Future()
    promise.set_running_or_notify_cancel()
    return promise
