"""Runs a generation job over the fake generator in this process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tinyloop.cluster.errors import JobError
from tinyloop.cluster.generate import GenerateKind
from tinyloop.cluster.generate_settings import GenerateSettings
from tinyloop.cluster.kinds import Backend, ModelChoice
from tinyloop.cluster.progress import PoolFigures
from tinyloop.cluster.running import run_job

from .fake_generator import FakeGenerator
from .score_driver import NoDisplay, kill_at_write, make_encoder
from .tiny_tokenizer import tiny_descriptor, tiny_tokenizer

MAX_ROWS = 48
DEPTH = 3
VOCAB = tiny_tokenizer().get_vocab_size()


def generate(
    settings: GenerateSettings, pool: FakeGenerator | None = None, *, max_rows: int = MAX_ROWS, **model: Any
) -> dict[str, Any]:
    """run_job over the fake generator. model: changes of the tiny model's descriptor. Returns the summary."""
    depth = settings.depth or DEPTH
    encoder = make_encoder(max_rows=max_rows, **model)
    descriptor = tiny_descriptor(tiny_tokenizer(), **{"exit_gate": True, **model})
    kind = GenerateKind.of_model(settings, descriptor, encoder, depth)
    identity = {"digest": "0" * 64, "depth": depth, "max_seq_len": max_rows}

    @contextmanager
    def open_backend() -> Iterator[Backend]:
        yield Backend(
            pool or FakeGenerator(VOCAB),
            encoder,
            depth,
            identity | {"numerics_id": "fake"},
            lambda: PoolFigures(1, 1, None, None),
        )

    return run_job(settings, kind, ModelChoice(identity, encoder.policy, {}), open_backend, NoDisplay())


def in_child(
    settings: GenerateSettings,
    *,
    write: int | None = None,
    on_collect: Callable[[int], None] | None = None,
) -> int:
    """generate in a forked process, which is killed at its write-th write. What its end was."""
    child = os.fork()
    if child == 0:
        if write is not None:
            kill_at_write(write)
        try:
            summary = generate(settings, FakeGenerator(VOCAB, on_collect=on_collect))
        except JobError as error:
            os._exit(int(error.exit_code))
        os._exit(int(summary["exit_code"]))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
