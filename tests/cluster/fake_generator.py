"""A pool in this process whose completions are a pure function of each request: the oracle of the job."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from fake_model import expected_completion
from tinyloop.cluster.generate_items import NotGenerated, Prompt, Tokens
from tinyloop.cluster.generate_ledger import Event

from .fake_pool import FakePool

Whole = tuple[list[int], list[float], list[int], str]


def whole_completion(prompt: Prompt, vocab: int) -> Whole:
    """Ids, log-probabilities, depths and reason of a request, by itself and to its end."""
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "min_depth")
    settings = {name: getattr(prompt, name) for name in names}
    threshold = np.inf if prompt.exit_threshold is None else prompt.exit_threshold
    return expected_completion(
        np.array(prompt.token_ids, dtype=np.int32),
        prompt.max_new_tokens,
        depth=prompt.depth,
        stop_ids=tuple(prompt.stop_ids or ()),
        seed=prompt.seed,
        vocab=vocab,
        exit_threshold=threshold,
        **settings,
    )


class FakeStream:
    """Hands out a few ids of a few completions at a time, in another order every time."""

    def __init__(self, pool: FakeGenerator, prompts: Sequence[Prompt]) -> None:
        self._pool = pool
        self._whole = [whole_completion(prompt, pool.vocab) for prompt in prompts]
        self._done = [0] * len(prompts)
        self._open = set(range(len(prompts)))
        self.closed = False

    def take(self, timeout_s: float) -> list[Event]:
        self._pool.count_take()
        events: list[Event] = []
        chosen = self._pool.random.sample(sorted(self._open), min(self._pool.prompts_a_take, len(self._open)))
        for prompt in chosen:
            events += self._some(prompt)
        return events

    def cancel(self, prompt: int) -> None:
        if prompt in self._open:
            self._open.remove(prompt)
            self._pool.cancelled += 1

    def close(self) -> None:
        self.closed = True
        self._open.clear()

    def _some(self, prompt: int) -> list[Event]:
        failure = self._pool.fail(prompt) if self._pool.fail is not None else None
        if failure is not None:
            self._open.remove(prompt)
            return [NotGenerated(prompt, failure, "made to fail", 3)]
        ids, logprobs, depths, reason = self._whole[prompt]
        begin = self._done[prompt]
        end = min(len(ids), begin + self._pool.random.randint(1, self._pool.ids_a_take))
        self._done[prompt] = end
        self._pool.num_ids += end - begin
        ended = end == len(ids)
        if ended:
            self._open.remove(prompt)
        return [
            Tokens(
                prompt,
                begin,
                np.array(ids[begin:end], dtype=np.int32),
                np.array(logprobs[begin:end], dtype=np.float32),
                np.array(depths[begin:end], dtype=np.int32),
                reason if ended else None,
            )
        ]


class FakeGenerator(FakePool):
    """fail: may name the class of the failure of a window's prompt."""

    def __init__(
        self,
        vocab: int,
        *,
        seed: int = 0,
        prompts_a_take: int = 9,
        ids_a_take: int = 5,
        fail: Callable[[int], str | None] | None = None,
        on_collect: Callable[[int], None] | None = None,
    ) -> None:
        super().__init__(seed=seed, on_collect=on_collect)
        self.vocab = vocab
        self.prompts_a_take = prompts_a_take
        self.ids_a_take = ids_a_take
        self.fail = fail
        self.streams: list[FakeStream] = []
        self.prompts: list[Prompt] = []
        self.cancelled = self.num_ids = 0

    def stream(self, prompts: Sequence[Prompt]) -> FakeStream:
        stream = FakeStream(self, prompts)
        self.streams.append(stream)
        self.prompts += prompts
        return stream

    def count_take(self) -> None:
        self.num_collects += 1
        if self.on_collect is not None:
            self.on_collect(self.num_collects)
