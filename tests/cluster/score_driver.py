"""Runs a score job over the fake pool, in this process or as a program that tests can kill.

As a program it takes one argument, JSON with the fields of ScoreSettings and: seed of the pool; kill_at_write
(end this process with SIGKILL at its n-th write); kill_at_collect; signal_at_collect [n, signal];
file_size_limit in bytes; everywhere (kill a job at each of its writes in turn); replaced_everywhere (the same
to a job that replaces another one of other settings); failing (some items fail); retried_everywhere.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tinyloop.cluster.encoding import Encoder, EncodingPolicy
from tinyloop.cluster.errors import ExitCode, JobError
from tinyloop.cluster.kinds import Backend, ModelChoice
from tinyloop.cluster.progress import PoolFigures, Snapshot
from tinyloop.cluster.score import run_score
from tinyloop.cluster.settings import ScoreSettings

from .fake_pool import FakePool
from .tiny_tokenizer import tiny_descriptor, tiny_tokenizer

MAX_ROWS = 48


class NoDisplay:
    """Shows nothing."""

    def show(self, snapshot: Snapshot) -> None:
        pass

    def close(self) -> None:
        pass


def make_encoder(
    settings: ScoreSettings | None = None, max_rows: int = MAX_ROWS, **changes: object
) -> Encoder:
    tokenizer = tiny_tokenizer()
    descriptor = tiny_descriptor(tokenizer, **changes)
    policy = EncodingPolicy.of_model(
        descriptor,
        max_rows,
        add_bos=settings.add_bos if settings else None,
        prefix_token=settings.prefix_token if settings else None,
        target_delimiter=settings.target_delimiter if settings else "",
        empty_continuation=settings.empty_continuation if settings else "error",
    )
    return Encoder(tokenizer, policy)


def score(
    settings: ScoreSettings, pool: FakePool | None = None, *, digest: str = "0" * 64, max_rows: int = MAX_ROWS
) -> dict[str, Any]:
    """run_score over the fake pool. Returns the summary."""
    encoder = make_encoder(settings, max_rows)
    depth = settings.depth or 4
    identity = {"digest": digest, "depth": depth, "max_seq_len": max_rows}

    @contextmanager
    def open_backend() -> Iterator[Backend]:
        yield Backend(
            pool=pool or FakePool(),
            encoder=encoder,
            depth=depth,
            identity=identity | {"numerics_id": "fake"},
            figures=lambda: PoolFigures(1, 1, 0.25, 0.5),
        )

    return run_score(settings, ModelChoice(identity, encoder.policy, {}), open_backend, NoDisplay())


def kill_at_write(n: int) -> None:
    """End this process, uncleanly, in the middle of the n-th write, rename or removal that it audits."""
    count = 0

    def hook(event: str, args: tuple[Any, ...]) -> None:
        nonlocal count
        if event in ("os.rename", "os.remove", "os.mkdir") or (event == "open" and "r" not in str(args[1])):
            count += 1
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def run(arguments: dict[str, Any]) -> int:
    """One job as the arguments say. Returns its exit code."""
    seed = arguments.pop("seed", 0)
    kill_at = arguments.pop("kill_at_write", None)
    kill_collect = arguments.pop("kill_at_collect", None)
    signal_collect = arguments.pop("signal_at_collect", None)
    limit = arguments.pop("file_size_limit", None)
    failing = arguments.pop("failing", False)
    arguments |= {"inputs": tuple(arguments["inputs"]), "output": Path(arguments["output"])}
    arguments["retry"] = frozenset(arguments.get("retry", ()))

    def on_collect(n: int) -> None:
        if n == kill_collect:
            os.kill(os.getpid(), signal.SIGKILL)
        if signal_collect is not None and n == signal_collect[0]:
            os.kill(os.getpid(), signal_collect[1])

    if limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    if kill_at is not None:
        kill_at_write(kill_at)
    try:
        summary = score(
            ScoreSettings(**arguments),
            FakePool(seed=seed, on_collect=on_collect, override=sometimes_failing if failing else None),
        )
    except JobError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    return int(summary["exit_code"])


def sometimes_failing(ids: np.ndarray, scores: list[np.float32]) -> list[np.float32] | str:
    """Fails about a fifth of all items, always the same ones."""
    return "internal" if int(ids.sum()) % 5 == 0 else scores


def kill_retry_everywhere(arguments: dict[str, Any]) -> list[str]:
    """Kill a retry at its first write, another at its second, and so on; resume each. Returns the folders.

    Half of the jobs were finished with failed rows before, half were killed on their way.
    """
    folders: list[str] = []
    while True:
        output = f"{arguments['output']}-{len(folders) + 1}"
        job = arguments | {"output": output, "resume": True}
        run_in_child(job | {"failing": True} | ({"kill_at_collect": 3} if len(folders) % 2 else {}))
        again = job | {"retry": ["internal"]}
        if run_in_child(again | {"kill_at_write": len(folders) + 1}) != -signal.SIGKILL:
            return folders
        run_in_child(job)
        # A kill before the retry was announced has left the old job as it was.
        if run_in_child(again) != ExitCode.ROW_ERRORS:
            raise RuntimeError(f"rows of {output} could not be tried again")
        folders.append(output)


def run_in_child(arguments: dict[str, Any]) -> int:
    """run in a forked process: what os.waitstatus_to_exitcode gives."""
    child = os.fork()
    if child == 0:
        os._exit(run(dict(arguments)))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(arguments: dict[str, Any]) -> list[str]:
    """Kill a job at its first write, another at its second, and so on; resume each. Returns the folders."""
    folders: list[str] = []
    while True:
        output = f"{arguments['output']}-{len(folders) + 1}"
        job = arguments | {"output": output}
        code = run_in_child(job | {"kill_at_write": len(folders) + 1})
        if code != -signal.SIGKILL:
            return folders
        if run_in_child(job) != ExitCode.ROW_ERRORS:
            raise RuntimeError(f"{output} could not be resumed")
        folders.append(output)


def kill_replacement_everywhere(arguments: dict[str, Any]) -> list[str]:
    """Kill an overwriting job at its first write, another at its second, and so on; resume each.

    A resume either ends well or is refused, and then overwriting again ends well. Returns the folders.
    """
    folders: list[str] = []
    while True:
        job = arguments | {"output": f"{arguments['output']}-{len(folders) + 1}"}
        old = job | {"depth": 1, "resume": False, "limit": 40}
        # Half of the old jobs are finished, half are under way.
        run_in_child(old | ({"kill_at_collect": 2} if len(folders) % 2 else {}))
        again = job | {"resume": False, "overwrite": True}
        if run_in_child(again | {"kill_at_write": len(folders) + 1}) != -signal.SIGKILL:
            return folders
        if run_in_child(job) != ExitCode.ROW_ERRORS and run_in_child(again) != ExitCode.ROW_ERRORS:
            raise RuntimeError(f"{job['output']} could not be replaced")
        folders.append(job["output"])


def main() -> int:
    arguments = json.loads(sys.argv[1])
    if arguments.pop("replaced_everywhere", False):
        print(json.dumps(kill_replacement_everywhere(arguments)))
        return 0
    if arguments.pop("retried_everywhere", False):
        print(json.dumps(kill_retry_everywhere(arguments)))
        return 0
    if arguments.pop("everywhere", False):
        print(json.dumps(kill_everywhere(arguments)))
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
