"""Decode and scoring on the CPU beside llama.cpp and transformers, interleaved in one process.

    python tests/bench/cpu_peers.py --gguf MODEL.gguf [--threads 1 2] [--repeats 5] [--systems ours-bf16 ...]
    python tests/bench/cpu_peers.py --random [--model SAME_SHAPE.tloop]

decode: one greedy request of 128 tokens after a prompt of 64, timed from its first new token to its last.
scoring: every log-probability of 512 tokens, from ids to a float32 array.

With --gguf all systems start from the same file: llama.cpp (through the package llama-cpp-python) takes it as
it is, transformers dequantizes it to float32 or bfloat16, ours is converted at group 32 and keeps its 4-bit
blocks. With --random they start from seeded random weights of SmolLM2-135M's shape, which llama.cpp cannot
read. Ours runs in both numeric modes; `kernels` says whether the bf16 mode had AMX or its emulation.
What a 4-bit file holds at more bits (the embedding and head, usually) has 4 bits in ours: fewer bytes to read
and other log-probabilities, so each line states the bytes of both files and every scorer's mean.

Every repeat runs every system once, in turn. One JSON line a case and thread count: tokens/s (medians), ours
over each peer (median over the repeats), and for each system that did not run why. same_tokens: how many
greedy tokens are those of the first system that ran; the prompt is noise, and one near tie parts all that
follows.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from random_llama import NAME, save_random_llama
from tinyloop.native import LoadError, load_model
from tinyloop.native.convert import convert
from transformers import AutoModelForCausalLM, StaticCache

PROMPT, NEW, SCORED = 64, 128, 512
BITS, GROUP = 4, 32  # the blocks of Q4_0 and Q4_1
OURS: dict[str, Literal["fp16", "bf16"]] = {"ours-fp16": "fp16", "ours-bf16": "bf16"}
SYSTEMS = (*OURS, "llama.cpp", "torch-float32", "torch-bfloat16", "torch-float32-compiled",
           "torch-bfloat16-compiled")  # fmt: skip
PACKAGES = ("torch", "transformers", "llama-cpp-python", "numpy")
Ids = NDArray[np.int32]


@dataclass(frozen=True)
class Source:
    """What all systems start from: a GGUF file, or a transformers folder of random weights."""

    name: str
    path: Path
    gguf: Path | None

    @property
    def size(self) -> int:
        files = self.path.rglob("*") if self.path.is_dir() else [self.path]
        return sum(file.stat().st_size for file in files)


class Unavailable(Exception):
    """Why a system cannot take part."""


class Clock:
    """The moments of the new tokens."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.times: list[float] = []

    def tick(self, token: int) -> None:
        self.tokens.append(token)
        self.times.append(time.perf_counter())

    def tokens_per_second(self) -> float:
        if len(self.tokens) != NEW:
            raise RuntimeError(f"the request gave {len(self.tokens)} tokens, not {NEW}")
        return (NEW - 1) / (self.times[-1] - self.times[0])


class System(Protocol):
    def decode(self, prompt: Ids, clock: Clock) -> None: ...
    def score(self, ids: Ids) -> NDArray[np.float32]: ...


class Ours:
    def __init__(self, model: Path, numeric_mode: Literal["fp16", "bf16"], threads: int) -> None:
        self.model = load_model(model, threads=threads, numeric_mode=numeric_mode)

    def decode(self, prompt: Ids, clock: Clock) -> None:
        if not hasattr(self.model, "generate"):
            raise Unavailable("this build of tinyloop has no Model.generate")
        from tinyloop.native import GenerateRequest

        request = GenerateRequest(prompt, NEW, temperature=0.0, stop_ids=())
        # on_token is given the request's index, then the token.
        self.model.generate([request], on_token=lambda _, token, *more: clock.tick(int(token)))

    def score(self, ids: Ids) -> NDArray[np.float32]:
        return self.model.score_tokens(ids)


class LlamaCpp:
    def __init__(self, gguf: Path | None, threads: int) -> None:
        if gguf is None:
            raise Unavailable("there is no GGUF file of random weights")
        if importlib.util.find_spec("llama_cpp") is None:
            raise Unavailable("llama-cpp-python is not installed")
        from llama_cpp import Llama

        settings: dict[str, Any] = {
            "n_ctx": SCORED, "n_batch": SCORED, "n_ubatch": SCORED, "verbose": False,
            "n_threads": threads, "n_threads_batch": threads,
        }  # fmt: skip
        self.decoder = Llama(str(gguf), **settings)
        self.scorer = Llama(str(gguf), logits_all=True, **settings)

    def decode(self, prompt: Ids, clock: Clock) -> None:
        from llama_cpp import llama_get_logits_ith

        llama = self.decoder
        llama.reset()
        llama.eval(prompt.tolist())
        while True:
            logits = np.ctypeslib.as_array(llama_get_logits_ith(llama.ctx, -1), shape=(llama.n_vocab(),))
            token = int(np.argmax(logits))
            clock.tick(token)
            if len(clock.tokens) == NEW:
                return
            llama.eval([token])

    def score(self, ids: Ids) -> NDArray[np.float32]:
        self.scorer.reset()
        self.scorer.eval(ids.tolist())
        return gather(torch.from_numpy(self.scorer.scores[: len(ids)]), ids)


class Transformers:
    def __init__(self, source: Source, dtype: torch.dtype, compiled: bool) -> None:
        if source.gguf is None:
            model = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype)
        elif importlib.util.find_spec("gguf") is None:
            raise Unavailable("the package gguf is not installed")
        else:
            from transformers import GgufConfig

            # Dense weights: the packed ones that some versions keep have kernels for other machines.
            model = AutoModelForCausalLM.from_pretrained(
                source.gguf.parent,
                gguf_file=source.gguf.name,
                dtype=dtype,
                quantization_config=GgufConfig(dequantize=True),
            )
        self.model = model.eval()
        self.compiled = compiled
        self.forward: Callable[..., Any] = torch.compile(self.model) if compiled else self.model

    @torch.no_grad()
    def decode(self, prompt: Ids, clock: Clock) -> None:
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        # A compiled step needs shapes that stay; an eager one is faster with a cache that grows.
        cache = StaticCache(config=self.model.config, max_cache_len=PROMPT + NEW) if self.compiled else None
        positions = torch.arange(PROMPT)
        out = self.model(ids, past_key_values=cache, position_ids=positions[None], use_cache=True,
                         logits_to_keep=1)  # fmt: skip
        while True:
            token = int(out.logits[0, -1].argmax())
            clock.tick(token)
            if len(clock.tokens) == NEW:
                return
            positions = positions[-1:] + 1
            out = self.forward(torch.tensor([[token]]), past_key_values=out.past_key_values,
                               position_ids=positions[None], use_cache=True)  # fmt: skip

    @torch.no_grad()
    def score(self, ids: Ids) -> NDArray[np.float32]:
        rows = torch.from_numpy(ids.astype(np.int64))[None]
        return gather(self.forward(rows, use_cache=False).logits[0], ids)


def gather(logits: torch.Tensor, ids: Ids) -> NDArray[np.float32]:
    targets = torch.from_numpy(ids[1:].astype(np.int64))[:, None]
    return logits[:-1].float().log_softmax(-1).gather(1, targets)[:, 0].numpy()


def open_system(name: str, source: Source, converted: Path, threads: int) -> System:
    if name in OURS:
        return Ours(converted, OURS[name], threads)
    if name == "llama.cpp":
        return LlamaCpp(source.gguf, threads)
    return Transformers(source, getattr(torch, name.split("-")[1]), name.endswith("-compiled"))


class Case:
    """Runs of one case. `run` gives tokens/s and what the run computed."""

    def __init__(self, name: str, run: Callable[[System], tuple[float, NDArray[Any]]]) -> None:
        self.name, self.run = name, run
        self.speeds: dict[str, list[float]] = {}
        self.results: dict[str, NDArray[Any]] = {}
        self.unavailable: dict[str, str] = {}

    def warm_up(self, name: str, system: System) -> None:
        try:
            self.results[name] = self.run(system)[1]
            self.speeds[name] = []
        except Unavailable as reason:
            self.unavailable[name] = str(reason)
        except Exception as error:  # a peer's own failure: the others are measured all the same
            if name in OURS:
                raise
            self.unavailable[name] = f"failed: {type(error).__name__}: {str(error)[:200]}"

    def repeat(self, systems: dict[str, System]) -> None:
        for name, speeds in self.speeds.items():
            speeds.append(self.run(systems[name])[0])

    def row(self) -> dict[str, Any]:
        row: dict[str, Any] = {
            "case": self.name,
            "tokens_per_s": {name: round(statistics.median(all_), 1) for name, all_ in self.speeds.items()},
            "unavailable": self.unavailable,
        }
        for mine in OURS.keys() & self.speeds.keys():
            row[f"{mine}_over"] = {
                name: round(statistics.median(a / b for a, b in zip(self.speeds[mine], all_, strict=True)), 3)
                for name, all_ in self.speeds.items()
                if name != mine
            }
        if self.name == "scoring":
            row["mean_logprob"] = {name: round(float(r.mean()), 4) for name, r in self.results.items()}
        else:
            first = next(iter(self.results.values()), None)
            row["same_tokens"] = {name: int((r == first).sum()) for name, r in self.results.items()}
        row["all_tokens_per_s"] = {name: [round(x, 1) for x in all_] for name, all_ in self.speeds.items()}
        return row


def cases(vocabulary: int) -> list[Case]:
    # Ordinary ids: the first few hundred of a vocabulary are control tokens and single bytes.
    ids = np.random.default_rng(0).integers(1000, min(vocabulary, 20000), SCORED).astype(np.int32)

    def decode(system: System) -> tuple[float, NDArray[Any]]:
        clock = Clock()
        system.decode(ids[:PROMPT], clock)
        return clock.tokens_per_second(), np.array(clock.tokens)

    def score(system: System) -> tuple[float, NDArray[Any]]:
        start = time.perf_counter()
        logprobs = system.score(ids)
        return SCORED / (time.perf_counter() - start), logprobs

    return [Case("decode", decode), Case("scoring", score)]


def measure(arguments: argparse.Namespace, source: Source, converted: Path, threads: int) -> None:
    torch.set_num_threads(threads)
    systems: dict[str, System] = {}
    absent: dict[str, str] = {}
    for name in arguments.systems:
        try:
            systems[name] = open_system(name, source, converted, threads)
        except Unavailable as reason:
            absent[name] = str(reason)
    with load_model(converted, threads=1) as model:
        vocabulary = model.descriptor["vocab_size"]
    for case in cases(vocabulary):
        if case.name not in arguments.cases:
            continue
        case.unavailable.update(absent)
        for name, system in systems.items():
            case.warm_up(name, system)
        for _ in range(arguments.repeats):
            case.repeat(systems)
        settings = {
            "threads": threads, "repeats": arguments.repeats, "source": source.name,
            "source_bytes": source.size, "our_bytes": converted.stat().st_size, "bits": BITS,
            "group": arguments.group, "kernels": bf16_kernels(converted), "processor": processor(),
            "versions": versions(),
        }  # fmt: skip
        print(json.dumps(case.row() | settings), flush=True)


def bf16_kernels(model: Path) -> str:
    try:
        load_model(model, max_seq_len=2, threads=1, numeric_mode="bf16", cpu_isa="amx").close()
    except LoadError as error:
        if "no amx" not in str(error):
            raise
        return "emulation"
    return "amx"


def versions() -> dict[str, str]:
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--gguf", type=Path)
    source.add_argument("--random", action="store_true")
    parser.add_argument("--model", type=Path, help="what ours loads, instead of converting the source")
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=GROUP)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=("decode", "scoring"), default=["decode", "scoring"])
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.random:
            chosen = Source(NAME, save_random_llama(Path(folder) / "random"), None)
        else:
            chosen = Source(arguments.gguf.name, arguments.gguf, arguments.gguf)
        converted = arguments.model or Path(folder) / "model.tloop"
        if arguments.model is None:
            convert(chosen.path, converted, bits=BITS, group=arguments.group)
        for threads in arguments.threads:
            measure(arguments, chosen, converted, threads)


if __name__ == "__main__":
    main()
