"""Scoring speed on the CPU beside PyTorch in float32, interleaved in one process.

    python tests/bench/cpu_scoring.py [--threads 1 2] [--repeats 5] [--model FILE.tloop] [--gguf FILE]

Cases: the shipped looped model against a plain PyTorch forward of the same weights, and a Llama of
SmolLM2-135M's shape at 4 bits (random weights, or those of --gguf) against `transformers`. Every
log-probability of 512 tokens is computed on both sides. One JSON line a case: tokens/s (medians) and the
ratio (median over the pairs of runs).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
from tinyloop.native import load_model
from tinyloop.native.convert import convert
from tinyloop.native.models import default_model_path
from tinyloop.native.reference import Reference
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

TOKENS = 512
Scorer = Callable[[], object]


def tokens_per_second(score: Scorer) -> float:
    start = time.perf_counter()
    score()
    return TOKENS / (time.perf_counter() - start)


def compare(name: str, ours: Scorer, peer: Scorer, threads: int, repeats: int, numerics: str) -> None:
    for warm_up in (ours, peer):
        warm_up()
    pairs = [(tokens_per_second(ours), tokens_per_second(peer)) for _ in range(repeats)]
    row = {
        "case": name,
        "threads": threads,
        "ours_tokens_per_s": round(statistics.median(a for a, _ in pairs), 1),
        "torch_float32_tokens_per_s": round(statistics.median(b for _, b in pairs), 1),
        "ratio": round(statistics.median(a / b for a, b in pairs), 3),
        "ratios": [round(a / b, 3) for a, b in pairs],
        "numerics_id": numerics,
        "torch": torch.__version__,
    }
    print(json.dumps(row), flush=True)


def llama_oracle(gguf: Path | None, folder: Path) -> tuple[LlamaForCausalLM, Path]:
    """The peer and the source that `convert` takes for ours."""
    if gguf is not None:
        peer = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        return peer.eval(), gguf
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30,
        num_attention_heads=9, num_key_value_heads=3, max_position_embeddings=2048,
        tie_word_embeddings=True, rms_norm_eps=1e-5,
    )  # fmt: skip
    peer = LlamaForCausalLM(config).eval()
    peer.save_pretrained(folder)
    words = {str(i): i for i in range(config.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")).save(
        str(folder / "tokenizer.json")
    )
    return peer, folder


@torch.no_grad()
def score_with_transformers(peer: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    logits = peer(ids[None]).logits[0, :-1]
    return logits.log_softmax(-1).gather(1, ids[1:, None])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--model", type=Path, default=default_model_path())
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    arguments = parser.parse_args()
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as folder:
        peer, source = llama_oracle(arguments.gguf, Path(folder) / "hf")
        llama = Path(folder) / "llama.tloop"
        convert(source, llama, bits=arguments.bits)
        looped = Reference.load(arguments.model, torch.float32)
        for threads in arguments.threads:
            torch.set_num_threads(threads)
            with load_model(arguments.model, threads=threads) as model:
                ids = rng.integers(0, model.descriptor["vocab_size"], TOKENS).astype(np.int32)
                depth = model.descriptor["loops"]
                compare(
                    "shipped model, all loops",
                    lambda model=model, ids=ids: model.score_tokens(ids),
                    lambda ids=ids, depth=depth: looped.logprobs(ids, depth),
                    threads, arguments.repeats, model.numerics_id,
                )  # fmt: skip
            with load_model(llama, threads=threads) as model:
                ids = rng.integers(0, 49152, TOKENS).astype(np.int32)
                long_ids = torch.from_numpy(ids.astype(np.int64))
                compare(
                    f"SmolLM2-135M shape, {arguments.bits} bits",
                    lambda model=model, ids=ids: model.score_tokens(ids),
                    lambda ids=long_ids: score_with_transformers(peer, ids),
                    threads, arguments.repeats, model.numerics_id,
                )  # fmt: skip


if __name__ == "__main__":
    main()
