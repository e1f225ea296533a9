"""Four local tasks of lm-evaluation-harness: a YAML file and a JSONL file each."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from paired_models import TEXT

WORDS = TEXT.replace(".", "").split()
TASKS = ("tiny_choices", "tiny_few_shots", "tiny_documents", "tiny_answers")


def _phrase(random_: random.Random, fewest: int, most: int) -> str:
    return " ".join(random_.choices(WORDS, k=random_.randint(fewest, most)))


def _questions(random_: random.Random, count: int) -> list[dict[str, Any]]:
    """Choices of one and of several tokens, some that end or begin oddly, some much longer than others."""
    rows = []
    for number in range(count):
        choices = [_phrase(random_, 1, 4) for _ in range(4)]
        if number % 5 == 0:
            choices[1] = "été " + choices[1]
        rows.append(
            {
                "question": _phrase(random_, 2, 60 if number % 6 == 0 else 12),
                "choices": choices,
                "gold": random_.randrange(4),
            }
        )
    return rows


def write_tasks(folder: Path) -> Path:
    """All tasks. Returns the folder, for --include_path."""
    random_ = random.Random(7)
    choices = {
        "output_type": "multiple_choice",
        "doc_to_text": "Question: {{question}}\nAnswer:",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": name} for name in ("acc", "acc_norm", "acc_mutual_info")],
    }
    _write(folder, "tiny_choices", choices, {"test": _questions(random_, 24)})
    _write(
        folder,
        "tiny_few_shots",
        choices | {"num_fewshot": 3, "fewshot_split": "train", "doc_to_text": "{{question}} "},
        {"test": _questions(random_, 16), "train": _questions(random_, 8)},
    )
    # Shorter and longer than a window, one empty.
    texts = [_phrase(random_, 1, 20) for _ in range(8)] + [_phrase(random_, 100, 300) for _ in range(4)]
    documents = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": m} for m in ("word_perplexity", "byte_perplexity", "bits_per_byte")],
    }
    _write(folder, "tiny_documents", documents, {"test": [{"text": text} for text in texts]})
    answers = {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", "ev", "ha", " gre"], "max_gen_toks": 24, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    }
    prompts = [{"text": _phrase(random_, 1, 30), "answer": "salt"} for _ in range(12)]
    _write(folder, "tiny_answers", answers, {"test": prompts})
    return folder


def _write(
    folder: Path, name: str, config: Mapping[str, Any], rows: Mapping[str, Sequence[Mapping[str, Any]]]
) -> None:
    files = {}
    for split, lines in rows.items():
        files[split] = str(folder / f"{name}.{split}.jsonl")
        Path(files[split]).write_text("".join(json.dumps(line) + "\n" for line in lines))
    whole = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files},
        "test_split": "test",
        **({"training_split": "train"} if "train" in rows else {}),
        **config,
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(whole, allow_unicode=False))
