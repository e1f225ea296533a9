"""What is done to rows, a sentence a policy: printed by --help, written to run.json, shown by the report.

The sentences stand here alone. Where a setting decides, run.json has its value behind the sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

# Of every kind of job.
COMMON: dict[str, str] = {
    "input": "lines end at line feeds, JSON is read strictly, blank lines are counted; --limit reads fewer",
    "invalid unicode": "lone surrogates are row errors, or U+FFFD with --invalid-unicode replace",
    "row ids": "custom_id, else id, else file, line and content; one that comes again is a row error",
    "determinism": "bits depend on row, model, depth and numerics alone; other processors may differ",
}

# Of scoring.
POLICIES: dict[str, str] = {
    "score": "sum of ln p(token) over the continuation's tokens, given everything before each",
    "precision": "log-softmax in FP32 over raw logits: no temperature, filter or penalty; sums in FP64",
    "whitespace": "trailing whitespace of the context moves to the front of the continuation and is scored",
    "boundary": "context and continuation are encoded together and split after the context's own tokens",
    "merged boundary": "if a token spans the join, the continuation is encoded alone: the row says 'merged'",
    "delimiter": "--target-delimiter is put before every continuation and choice; none by default",
    "normalisation": "none of ours: no Unicode form is changed, nothing is stripped; tokenizers may do so",
    "bos": "as the model's own tokenizer does unless --add-bos or --no-add-bos; never two, never scored",
    "eos": "never added; a tokenizer that adds one is refused",
    "empty context": "conditioned on --prefix-token, else BOS, else EOS; a text's own counts",
    "empty continuation": "row error, or --empty-continuation zero: 0 tokens, log-probability 0",
    "missing fields": "absent and null are row errors; empty text is text",
    "window": "at most --max-seq-len tokens are fed for any row: one length for pairs and documents",
    "truncation": "context tokens are dropped from the left to window + 1 in all; a lost BOS is flagged",
    "long continuation": "never cut: more tokens than the window is a row error",
    "token ids": "context_ids and continuation_ids are taken as they are: no BOS, no whitespace move",
    "special tokens": "a special token spelled out in the text is that token",
    "greedy": "true if every scored token is the argmax, lowest id on ties, as greedy decoding picks",
    "log-probabilities": "with --logprobs one number a scored token, in their order",
    "accuracies": "argmax of the sum (acc) or of it by character (acc_norm), byte, token of the bare choice",
    "pmi": "with --pmi also argmax of the sum less that after the empty context, with the same delimiter",
    "ties": "the first of equal choices counts; ties are flagged and counted",
    "failed choices": "one fails its question, which is neither ranked nor counted as wrong",
    "duplicate choices": "scored, flagged and counted: they tie by construction",
    "gold": "outside the choices it is a row error",
    "non-finite": "NaN and infinity are row errors; a zero probability is null, as is every sum with one",
    "documents": "scored one by one after the prefix token, every token once, the last window moved left",
    "rolling": "disjoint, or with --stride N strided:N, that many tokens scored in each further window",
    "bos in windows": "the prefix token is in the first window alone, or in each with --bos-every-window",
    "perplexity": "sums of nats by sums of tokens, UTF-8 bytes or words between whitespace; empty ones apart",
    "equal requests": "computed once; each row has its own line",
    "depth": "loops run, those the model was made for unless --depth; more is allowed and warned of",
    "cascade": "--cascade 2:4 runs all rows to 2 and only those to 4 whose margin is below --margin",
    "margin": "best less second best summed log-probability of a row's choices, in nats; with --pmi too",
    "exit gate": "--exit-threshold: from --min-depth on rows stop where gates let every scored token go",
    "depth of a row": "choices of a row, and what --pmi adds, go to one depth, with a plain run's scores",
    "windows of a text": "go by their own gates: depth is the largest, depth_mean by scored tokens",
    "agreement": "--agreement-rows are scored at full depth too, for summary.json alone",
    **COMMON,
}

# Which settings decide, as the fingerprint names them, in jobs of any kind; "*" stands for any last part.
DECIDED_BY: dict[str, tuple[str, ...]] = {
    "delimiter": ("encoding.target_delimiter",),
    "bos": ("encoding.add_bos", "encoding.bos_id"),
    "empty context": ("encoding.prefix_id",),
    "empty continuation": ("encoding.empty_continuation",),
    "empty prompt": ("encoding.prefix_id",),
    "window": ("encoding.max_rows",),
    "truncation": ("encoding.max_rows",),
    "long prompt": ("task.long_prompt",),
    "messages": ("task.template",),
    "settings": ("task.defaults.*",),
    "seed": ("task.seed",),
    "batch lines": ("task.result_style",),
    "log-probabilities": ("task.token_logprobs",),
    "pmi": ("task.pmi",),
    "rolling": ("task.rolling.stride",),
    "bos in windows": ("task.rolling.bos_every_window",),
    "input": ("read.limit",),
    "invalid unicode": ("read.replace_surrogates",),
    "depth": ("model.depth",),
    "cascade": ("task.effort", "task.effort.depths"),
    "margin": ("task.effort", "task.effort.margin"),
    "exit gate": ("task.effort", "task.effort.exit_threshold"),
    "determinism": ("model.numerics_id", "model.kv"),
}

_SHOWN: dict[str, Callable[[Any], str]] = {
    "task.rolling.stride": lambda stride: "disjoint" if stride is None else f"strided:{stride}",
    "task.effort": lambda rule: "fixed depth",
    "task.template": lambda digest: digest[:12] or "the model's own",
    "read.limit": lambda limit: "all rows" if limit is None else f"the first {limit} rows",
    "read.replace_surrogates": lambda replace: "replace" if replace else "row error",
}


def in_force(policies: Mapping[str, str], fingerprint: Mapping[str, Any]) -> dict[str, str]:
    """Each policy's sentence and, where settings decide, what they are in a job of this fingerprint."""
    return {name: text + _decision(name, fingerprint) for name, text in policies.items()}


def _decision(name: str, fingerprint: Mapping[str, Any]) -> str:
    keys = [key for pattern in DECIDED_BY.get(name, ()) for key in _matching(pattern, fingerprint)]
    shown = ", ".join(f"{_short(key)} {_value(key, fingerprint[key])}" for key in keys)
    return f" [here: {shown}]" if shown else ""


def _matching(pattern: str, fingerprint: Mapping[str, Any]) -> list[str]:
    if not pattern.endswith(".*"):
        return [pattern] if pattern in fingerprint else []
    return [key for key in fingerprint if key.startswith(pattern[:-1])]


def _short(key: str) -> str:
    return key.rpartition(".")[2].replace("_", " ")


def _value(key: str, value: Any) -> str:
    return _SHOWN.get(key, json.dumps)(value)
