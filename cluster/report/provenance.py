"""How the numbers came about: command, model, inputs, policies, settings, versions. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from .figure import nothing, pairs
from .markup import Markup, cut, tag

# Of one run alone: who reproduces it names a folder of his own.
_OF_THE_RUN = ("--resume", "--overwrite")


def reproduce(command: Sequence[str]) -> Markup:
    """The one command that gives these results again."""
    words = [word for word in command if word not in _OF_THE_RUN]
    if not words:
        return nothing("The command", "The folder does not say with which command this job was started.")
    words[0] = "tinyloop"
    return tag(
        "div",
        tag("h3", "The command"),
        tag("pre", tag("code", shlex.join(words))),
        tag(
            "p",
            "In the same folder, with another name after -o. With the model, inputs and versions below it "
            "gives the same "
            "results.jsonl, byte for byte, on the same kind of device, with any number of replicas.",
            class_="note",
        ),
        class_="card",
    )


def settings(run: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> list[Markup]:
    """Everything that decides a byte of the results, and what else is known."""
    if not run and not fingerprint:
        return [nothing("Settings", "The folder has neither run.json nor fingerprint.json.")]
    cards = [_card("Model", _model(run, fingerprint)), _card("Inputs", _inputs(fingerprint))]
    policies = run.get("policies")
    if isinstance(policies, Mapping):
        cards.append(_card("Policies in force", [(str(k), str(v)) for k, v in policies.items()]))
    else:
        cards.append(
            nothing(
                "Policies in force", "They are listed in run.json, which is written when a job is finished."
            )
        )
    others = [(k, _value(v)) for k, v in fingerprint.items() if not k.startswith(("model.", "inputs."))]
    cards.append(_card("Settings", others, kind="even"))
    versions = run.get("versions")
    if isinstance(versions, Mapping):
        cards.append(_card("Versions", [(str(k), str(v)) for k, v in versions.items()]))
    return [card for card in cards if card]


def _model(run: Mapping[str, Any], fingerprint: Mapping[str, Any]) -> list[tuple[str, str]]:
    named = run.get("model")
    about = [(str(k), _value(v)) for k, v in named.items()] if isinstance(named, Mapping) else []
    return about + [
        (k.removeprefix("model."), _value(v)) for k, v in fingerprint.items() if k.startswith("model.")
    ]


def _inputs(fingerprint: Mapping[str, Any]) -> list[tuple[str, str]]:
    count = fingerprint.get("inputs.count")
    files = range(min(count, 100)) if type(count) is int else ()
    shown = [
        (
            _value(fingerprint.get(f"inputs.{i}.label")),
            f"sha256 {_value(fingerprint.get(f'inputs.{i}.sha256'))}",
        )
        for i in files
    ]
    if type(count) is int and count > len(shown):
        shown.append((f"and {count - len(shown):,} more", "see run.json"))
    return shown


def _card(heading: str, rows: list[tuple[str, str]], *, kind: str = "") -> Markup:
    if not rows:
        return nothing(heading, "The folder does not say.")
    return tag(
        "div", tag("h3", heading), pairs([(k, cut(v, 500)) for k, v in rows]), class_=f"card {kind}".strip()
    )


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "default" if value is None else str(value)
