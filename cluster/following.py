"""Following a job on a cluster: its log as it grows, through lost connections, to its end.

A connection that drops says nothing about the job: only the job server's word that it is over does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .errors import InfrastructureError, Interrupted
from .submitted import JobView

SHORTEST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 5.0
# A head node that is replaced, or a network that is repaired, takes minutes.
PATIENCE_S = 300.0


class ServerUnreachable(Exception):
    """The job server did not answer this time."""


class JobServer(Protocol):
    """What is asked of a job server. Every call may raise ServerUnreachable."""

    def look(self, job: str) -> JobView | None:
        """The job as it is now, None if there is none of that id."""

    def log(self, job: str) -> str | None:
        """All that it has printed so far, None if that cannot be had, as when its node is gone."""

    def stop(self, job: str) -> None:
        """Ask it to stop in order; it may take as long as its stop wait allows."""


@dataclass
class Wishes:
    """What the person at the keyboard wants, as signals come in."""

    stop: bool = False
    leave: bool = False


class Follower:
    """Follows one job to its end.

    echo: prints a piece of the log. note: prints a line of our own. wait: pauses up to so many seconds and
    returns what is wished by then.
    """

    def __init__(
        self,
        server: JobServer,
        job: str,
        *,
        echo: Callable[[str], None],
        note: Callable[[str], None],
        wait: Callable[[float], Wishes],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server = server
        self._job = job
        self._echo = echo
        self._note = note
        self._wait = wait
        self._clock_s = clock_s
        self._silent_since_s: float | None = None
        self._asked_to_stop = False
        self.printed = ""

    def run(self) -> JobView:
        """Return the job as it ended; `printed` is then its whole log.

        Raises: Interrupted if the person leaves; InfrastructureError if the server has not answered for
        PATIENCE_S or no longer knows the job.
        """
        pause_s = SHORTEST_PAUSE_S
        while True:
            before = len(self.printed)
            view = self._look()
            if view is not None and view.is_over:
                return view
            grew = len(self.printed) > before
            pause_s = SHORTEST_PAUSE_S if grew else min(2 * pause_s, LONGEST_PAUSE_S)
            self._heed(self._wait(pause_s))

    def _look(self) -> JobView | None:
        """One look at status and log, None if the server does not answer."""
        try:
            # In this order, so that the log of a job that is over is the whole of it.
            view = self._server.look(self._job)
            if view is not None:
                self._print(self._server.log(self._job))
        except ServerUnreachable as error:
            self._missed(error)
            return None
        if view is None:
            raise InfrastructureError(
                f"the cluster does not know job {self._job!r} any more: it was started anew, and its jobs "
                "ended with it: submit again with --resume"
            )
        if self._silent_since_s is not None:
            self._note("the job server answers again")
            self._silent_since_s = None
        return view

    def _print(self, log: str | None) -> None:
        if log is not None and len(log) > len(self.printed):
            self._echo(log[len(self.printed) :])
            self.printed = log

    def _missed(self, error: ServerUnreachable) -> None:
        now_s = self._clock_s()
        if self._silent_since_s is None:
            self._silent_since_s = now_s
            self._note(f"the job server does not answer ({error}): the job may well go on; trying again")
        elif now_s - self._silent_since_s > PATIENCE_S:
            raise InfrastructureError(
                f"the job server has not answered for {PATIENCE_S:.0f} s ({error}): the job may well go on: "
                f"follow it again with --submission-id {self._job}"
            ) from error

    def _heed(self, wishes: Wishes) -> None:
        if wishes.leave:
            raise Interrupted(
                f"no longer following: the job goes on or stops by itself: follow it again with "
                f"--submission-id {self._job}"
            )
        if wishes.stop and not self._asked_to_stop:
            try:
                self._server.stop(self._job)
            except ServerUnreachable as error:
                self._note(f"the job server does not answer ({error}): not stopped yet, trying again")
                return
            self._asked_to_stop = True
            self._note("stopping the job in order; Ctrl-C again leaves it to that")
