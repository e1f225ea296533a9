"""Whose turn it is: deficit round robin between clients, in seconds of replica time. Pure.

Seconds and not items or tokens, because what clients compete for is the replicas' time and a prefix that is
held makes an item cheap. Deficit round robin and not a sorted queue, because the price of a chunk is known
only when it is cut and exactly only when it comes back: a turn may overdraw, and the debt is carried over.
"""

from __future__ import annotations

from collections import deque
from math import ceil


class Shares:
    """The clients that have work waiting, the one whose turn it is first."""

    def __init__(self, quantum_s: float) -> None:
        """quantum_s: what a turn may spend; with chunks of that length nobody is ever ahead by much more."""
        self._quantum_s = quantum_s
        self._turns: deque[str] = deque()
        self._left_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def join(self, client: str) -> None:
        """A client has work waiting from now on. One that comes anew has neither savings nor debts."""
        if client not in self._left_s:
            self._turns.append(client)
            self._left_s[client] = 0.0

    def leave(self, client: str) -> None:
        """A client has nothing waiting any more. What it saved up by not using its turns is lost."""
        if self._left_s.pop(client, None) is not None:
            self._turns.remove(client)

    def in_turn(self) -> list[str]:
        """Clients in the order in which they may take the next chunk."""
        turns, left_s = self._turns, self._left_s
        if len(turns) > 1 and left_s[turns[0]] <= 0.0:
            turns.rotate(-1)
            self._grant()
        return list(turns)

    def charge(self, client: str, seconds: float) -> None:
        """A chunk of that estimated price was dispatched for a client, or one cost so much more than that."""
        if client in self._left_s:
            self._left_s[client] -= seconds

    def _grant(self) -> None:
        """Give quanta, as many rounds as it takes until somebody may spend, and find whose turn that is."""
        turns, left_s = self._turns, self._left_s
        rounds = min(ceil(max(-left_s[client], 0.0) / self._quantum_s) for client in turns)
        if rounds > 1:
            for client in turns:
                left_s[client] = min(left_s[client] + (rounds - 1) * self._quantum_s, 0.0)
        while True:
            left_s[turns[0]] = min(left_s[turns[0]], 0.0) + self._quantum_s
            if left_s[turns[0]] > 0.0:
                return
            turns.rotate(-1)
