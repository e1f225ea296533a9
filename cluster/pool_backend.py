"""A model file and a Ray pool as the backend of a job."""

from __future__ import annotations

import hashlib
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from ..native.format import FormatError, Header, read_header
from ..native.models import default_model_path
from ..native.tokenizer import load_tokenizer
from .config import PoolConfig
from .config_file import shown
from .encoding import Encoder, EncodingPolicy
from .errors import InfrastructureError, UsageError
from .generate_items import Prompt
from .generate_ledger import Event
from .items import Failed, Items, Scored
from .kinds import Backend, BatchPool, ModelChoice
from .lanes import ReplicaMoment
from .progress import PoolFigures
from .prompt_streams import PromptStream
from .settings import JobSettings, PoolRequest

if TYPE_CHECKING:
    from .pool import ReplicaPool
    from .pool_status import PoolStatus, ReplicaStatus

# How a replica says that the engine refused the model file or an option, and not that a machine failed.
LOAD_ERROR = "phase load: LoadError"
DEFAULT_MAX_SEQ_LEN = 2048
VERSIONS_OF = ("tinyloop-pool", "numpy", "ray", "tokenizers")


@dataclass(frozen=True, slots=True)
class ChosenModel:
    """A model file that was read and found fit for a job."""

    path: Path
    depth: int
    max_seq_len: int
    encoder: Encoder
    choice: ModelChoice
    warnings: tuple[str, ...]
    descriptor: Mapping[str, Any] = field(default_factory=dict)


def choose_model(settings: JobSettings, request: PoolRequest) -> ChosenModel:
    """Read the model's header and tokenizer, and hold the settings against them.

    Raises: UsageError if the file cannot be read or a setting does not fit it.
    """
    path = request.model or default_model_path()
    try:
        header = read_header(path)
        _refuse_prefix_lm(path, header)
        tokenizer = load_tokenizer(header)
    except (FormatError, OSError) as error:
        raise UsageError(f"cannot use model {str(path)!r}: {foreign_model(path) or error}") from error
    if request.device == "cuda" and request.numeric == "bf16":
        raise UsageError("--numeric bf16 is a mode of the CPU: use fp16 with --device cuda")
    descriptor: dict[str, Any] = dict(header.descriptor)
    depth, warnings = _depth(settings.depth, descriptor["loops"])
    max_seq_len = _max_seq_len(request.max_seq_len, descriptor["max_positions"])
    policy = EncodingPolicy.of_model(
        descriptor,
        max_seq_len,
        **settings.encoding,
    )
    identity = {
        "digest": header.digest,
        "tokenizer": hashlib.sha256(header.tokenizer_json).hexdigest(),
        "depth": depth,
        "max_seq_len": max_seq_len,
        "kv": request.kv,
        "numeric": request.numeric,
        "device": request.device,
    }
    choice = ModelChoice(identity, policy, _about(path, header, request))
    return ChosenModel(path, depth, max_seq_len, Encoder(tokenizer, policy), choice, warnings, descriptor)


def foreign_model(path: Path) -> str:
    """What to do with a model of another format, empty if it is none that is known."""
    if path.is_dir():
        kind = "a folder"
    elif not path.is_file():
        return ""  # a FIFO would be waited for
    else:
        try:
            with path.open("rb") as file:
                start = file.read(16)
        except OSError:
            return ""
        if start.startswith(b"GGUF"):
            kind = "a GGUF file"
        elif start[8:9] == b"{" and int.from_bytes(start[:8], "little") <= path.stat().st_size:
            kind = "a safetensors file"
        else:
            return ""
    source = path.parent if kind == "a safetensors file" else path
    return f"it is {kind}: make a model file of it first: tinyloop convert {source} {path.stem}.tloop"


def _refuse_prefix_lm(path: Path, header: Header) -> None:
    if header.descriptor["prefix_lm"]:
        raise UsageError(
            f"cannot use model {str(path)!r}: it attends to a prompt in both directions, so prompts "
            "cannot be shared in parts: score it with tinyloop.native and prompt_lens"
        )


def _depth(asked: int | None, loops: int) -> tuple[int, tuple[str, ...]]:
    depth = loops if asked is None else asked
    if depth <= loops:
        return depth, ()
    if loops == 1:
        raise UsageError(f"--depth is {depth}, the model is not a looped one: leave it out")
    return depth, (f"depth {depth} is beyond the {loops} loops the model was made for: scores get worse",)


def _max_seq_len(asked: int | None, max_positions: int) -> int:
    if asked is not None and asked > max_positions:
        raise UsageError(
            f"--max-seq-len is {asked}, the model has {max_positions} positions: ask for at most those"
        )
    return asked or min(DEFAULT_MAX_SEQ_LEN, max_positions)


def _about(path: Path, header: Header, request: PoolRequest) -> dict[str, Any]:
    return {
        "command": sys.argv,
        "model": {"file": str(path), **header.metadata},
        "pool": {
            "replicas": request.replicas or 1,
            "threads": request.threads,
            "kv": request.kv,
            "numeric": request.numeric,
            "device": request.device,
        },
        "versions": {name: version(name) for name in VERSIONS_OF} | {"python": platform.python_version()},
    }


@contextmanager
def open_pool(chosen: ChosenModel, request: PoolRequest) -> Iterator[Backend]:
    """Start a Ray pool with the chosen model and end it on leaving, or join a named one and leave that up.

    Raises: InfrastructureError if it cannot start, UsageError if the pool's settings are not valid or the
    engine refuses the model.
    """
    config = None if request.name is not None else _pool_config(chosen, request)
    address = os.environ.get("RAY_ADDRESS")
    if config is not None:
        # Said at once: what follows takes seconds.
        how = f"connecting to Ray at {address}" if address else "starting the pool"
        print(how, file=sys.stderr, flush=True)
    # Imported here: Ray takes seconds to load, and settings are checked before.
    from .fleet import PoolError
    from .pool import ReplicaPool

    try:
        pool = ReplicaPool.start(config) if config is not None else ReplicaPool.connect(str(request.name))
    except PoolError as error:
        if LOAD_ERROR in str(error):
            # The same file and options fail in the same way on every run.
            raise UsageError(f"cannot use model {str(chosen.path)!r}: {error}") from error
        raise InfrastructureError(f"cannot start the pool: {error}") from error
    with pool:
        info = pool.info
        if (info.digest, info.max_seq_len) != (chosen.choice.identity["digest"], chosen.max_seq_len):
            raise InfrastructureError(
                f"replicas hold model {info.digest[:12]} with a window of {info.max_seq_len}, the job is for "
                f"{chosen.choice.identity['digest'][:12]} with {chosen.max_seq_len}: was the file replaced?"
            )
        yield Backend(
            pool=JobPool(pool, PoolError),
            encoder=chosen.encoder,
            depth=chosen.depth,
            identity={**chosen.choice.identity, "numerics_id": info.numerics_id},
            figures=FigureSource(pool, PoolError),
        )


def _pool_config(chosen: ChosenModel, request: PoolRequest) -> PoolConfig:
    try:
        return PoolConfig(
            model=chosen.path.resolve(),
            replicas=request.replicas or 1,
            threads=request.threads,
            max_seq_len=chosen.max_seq_len,
            cache_mode=request.kv,
            numeric_mode=request.numeric,
            device=request.device,
        )
    except ValidationError as error:
        raise UsageError(f"the pool cannot be made as asked: {shown(error)}") from error


class JobPool:
    """A pool whose failures end a job with the right exit code."""

    def __init__(self, pool: BatchPool, failure: type[Exception]) -> None:
        self._pool = pool
        self._failure = failure

    def submit(self, window: int, items: Items) -> None:
        """As the pool's. Raises: InfrastructureError."""
        try:
            self._pool.submit(window, items)
        except self._failure as error:
            raise _failed(error) from error

    def stream(self, prompts: Sequence[Prompt]) -> JobStream:
        """As the pool's. Raises: InfrastructureError."""
        try:
            return JobStream(self._pool.stream(prompts), self._failure)
        except self._failure as error:
            raise _failed(error) from error

    def collect(self, timeout_s: float) -> list[Scored | Failed]:
        """As the pool's. Raises: InfrastructureError."""
        try:
            return self._pool.collect(timeout_s)
        except self._failure as error:
            raise _failed(error) from error


class JobStream:
    """A stream whose failures end a job with the right exit code."""

    def __init__(self, stream: PromptStream, failure: type[Exception]) -> None:
        self._stream = stream
        self._failure = failure

    def take(self, timeout_s: float) -> list[Event]:
        """As the stream's. Raises: InfrastructureError."""
        try:
            return self._stream.take(timeout_s)
        except self._failure as error:
            raise _failed(error) from error

    def cancel(self, prompt: int) -> None:
        """As the stream's. Raises: InfrastructureError."""
        try:
            self._stream.cancel(prompt)
        except self._failure as error:
            raise _failed(error) from error

    def close(self) -> None:
        """As the stream's."""
        self._stream.close()


def _failed(error: Exception) -> InfrastructureError:
    return InfrastructureError(f"the pool failed: {error}: run again with --resume")


class FigureSource:
    """A pool's status as figures; the last ones known while the pool does not answer."""

    def __init__(self, pool: ReplicaPool, failure: type[Exception]) -> None:
        self._pool = pool
        self._failure = failure
        self._latest = PoolFigures()

    def __call__(self) -> PoolFigures:
        # What ends the job is met where work is collected; figures only get old.
        with suppress(self._failure):
            self._latest = _figures(self._pool.status())
        return self._latest


def _figures(status: PoolStatus) -> PoolFigures:
    total, sent = status.tokens_total, status.tokens_sent
    return PoolFigures(
        replicas=len(status.replicas),
        replicas_alive=status.alive,
        hit_rate=status.hit_rate if total else None,
        ideal_hit_rate=(sent - status.tokens_ideal) / sent if sent else None,
        detail={
            "tokens_total": total,
            "tokens_sent": sent,
            "tokens_computed": status.tokens_computed,
            "tokens_ideal": status.tokens_ideal,
            "replica_deaths": status.deaths,
            "refusals": status.refusals,
            "mirror_differences": status.mirror_differences,
            "steals": status.steals,
            "chunks": status.chunks,
            "evictions": status.evictions,
            "router_cpu_s": round(status.router_cpu_s, 3),
        },
        moments=tuple(_moment(replica) for replica in status.replicas),
    )


def _moment(replica: ReplicaStatus) -> ReplicaMoment:
    return ReplicaMoment(
        slot=replica.slot,
        generation=replica.generation,
        state=replica.verdict,
        host=replica.host,
        busy_s=replica.busy_s,
        in_flight=replica.in_flight,
        prefix_bytes=replica.prefix_bytes,
        prefix_budget_bytes=replica.prefix_budget_bytes,
        memory_bytes=replica.memory_bytes,
        trouble=replica.trouble,
    )
