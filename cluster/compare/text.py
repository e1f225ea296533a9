"""A comparison as lines for people. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..progress import counted
from ..report.scale import duration, percent, short

CHANGED_PRINTED = 10


def lines(compared: Mapping[str, Any], objections: Sequence[str]) -> Iterator[str]:
    """compared: what Compared.as_json gives."""
    for side in "ab":
        yield f"{side.upper()}: {_run(compared[side])}"
    yield from _settings(compared["settings"])
    yield _pairs(compared)
    for group in compared["groups"]:
        yield from _group(group)
    yield from _logprobs(compared["logprob_difference"])
    yield from _depth(compared["depth"])
    yield from _changed(compared)
    yield from (f"beyond what is allowed: {objection}" for objection in objections)


def _run(run: Mapping[str, Any]) -> str:
    parts = [f"{run['folder']} ({run['state']})"]
    if run["rows"] is not None:
        parts.append(f"{counted(run['rows'], 'row')}, {counted(run['errors'], 'error')}")
    if run["elapsed_s"] is not None:
        parts.append(duration(run["elapsed_s"]))
    if run["rows_per_s"] is not None:
        parts.append(f"{short(run['rows_per_s'])} rows/s")
    if run["hit_rate"] is not None:
        parts.append(f"hit rate {percent(run['hit_rate'])}")
    return ", ".join(parts)


def _settings(settings: Mapping[str, Any]) -> Iterator[str]:
    if not settings:
        yield "settings: the same model, inputs and settings"
    for key, values in settings.items():
        yield f"setting {key}: {values['a']!r} in A, {values['b']!r} in B"


def _pairs(compared: Mapping[str, Any]) -> str:
    said = f"{counted(compared['pairs'], 'row')} in both, {compared['identical_lines']:,} of them identical"
    for side, other in ("ab", "ba"):
        only, failed = compared[f"only_{side}"], compared[f"failed_in_{other}"]
        if only:
            said += f", {only:,} with a result in {side.upper()} alone ({failed:,} failed in {other.upper()})"
    for name in ("incomparable", "unreadable"):
        if compared[name]:
            said += f", {compared[name]:,} {name}"
    if not compared["pairs"] and compared["only_a"]:
        said += ": rows without an id are named after their file, so give both runs the same input files"
    return said


def _group(group: Mapping[str, Any]) -> Iterator[str]:
    name = f"{group['file']} [{group['task']}]"
    for metric, values in group["accuracy"].items():
        yield (
            f"{name} {metric}: {values['a']:.4f} in A, {values['b']:.4f} in B, difference "
            f"{values['difference']:+.4f} (95 %: {values['difference_low']:+.4f} to "
            f"{values['difference_high']:+.4f}), {values['only_a_right']:,} right in A alone, "
            f"{values['only_b_right']:,} in B alone, McNemar p = {values['mcnemar_p']:.3g}"
        )
    if group["changed_choice"]:
        yield f"{name}: {counted(group['changed_choice'], 'row')} changed the choice"
    bits = group.get("bits_per_byte_difference")
    if bits:
        yield (
            f"{name} bits per byte, B less A: {bits['mean']:+.6f} +- {bits['half_width_95']:.6f} on "
            f"{counted(bits['documents'], 'document')}"
        )


def _logprobs(values: Mapping[str, Any]) -> Iterator[str]:
    if not values["scores"]:
        return
    quantiles = ", ".join(f"{name} {value:.3g}" for name, value in values["quantiles"].items())
    yield (
        f"log-probabilities: {values['equal']:,} of {values['scores']:,} equal; size of differences: mean "
        f"{values['mean_size']:.3g}, {quantiles}, largest {values['largest']:.3g}; B less A "
        f"{values['mean_b_less_a']:+.3g} +- {values['half_width_95']:.3g}"
    )
    if values["zero_probability_in_one"]:
        yield f"zero probability in one run alone: {values['zero_probability_in_one']:,}"


def _depth(depth: Mapping[str, Any]) -> Iterator[str]:
    if depth["a"]["mean"] is not None and depth["b"]["mean"] is not None:
        yield f"mean depth: {depth['a']['mean']:.2f} loops in A, {depth['b']['mean']:.2f} in B"


def _changed(compared: Mapping[str, Any]) -> Iterator[str]:
    shown = compared["changed_rows"][:CHANGED_PRINTED]
    for row in shown:
        gold = "" if row["gold"] is None else f", gold {row['gold']}"
        yield f"changed: {row['id']} ({row['file']}:{row['line']}): {row['a']} in A, {row['b']} in B{gold}"
    if compared["changed_choice"] > len(shown):
        yield f"changed: and {compared['changed_choice'] - len(shown):,} more"
