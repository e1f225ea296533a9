"""Encoders and decoders of each message, side by side: no field can be written and not read."""

from __future__ import annotations

import math

from .wire import (
    VERSION,
    Ack,
    Build,
    Command,
    HeldPrefix,
    Inventory,
    ItemFailure,
    Result,
    WireError,
    array_fields,
    array_from,
    counted,
    digest_from,
    kind_of_work,
    listed,
    pack,
    record,
    typed,
    unpack,
)


def encode_command(command: Command) -> bytes:
    """A command as bytes."""
    builds = [[b.digest, b.parent, b.source, b.begin, b.end] for b in command.builds]
    fields: list[object] = [
        command.epoch,
        command.sequence,
        command.window,
        command.depth,
        list(command.drops),
        builds,
    ]
    fields += [list(command.prefixes), array_fields(command.items), array_fields(command.prefix_of)]
    fields.append(command.kind)
    return pack("command", fields)


def decode_command(message: bytes) -> Command:
    """A command from bytes. Raises WireError."""
    epoch, sequence, window, depth, drops, builds, prefixes, items, prefix_of, kind = unpack(
        "command", message, 10
    )
    command = Command(
        epoch=counted(epoch),
        sequence=counted(sequence),
        window=typed(window, str),
        depth=counted(depth),
        drops=tuple(digest_from(digest) for digest in listed(drops)),
        builds=tuple(_build_from(build) for build in listed(builds)),
        prefixes=tuple(digest_from(digest) for digest in listed(prefixes)),
        items=array_from(items, "<i4"),
        prefix_of=array_from(prefix_of, "<i4"),
        kind=kind_of_work(kind),
    )
    if len(command.items) != len(command.prefix_of):
        raise WireError(f"{len(command.items)} items but {len(command.prefix_of)} prefix indices")
    if len(command.items) and (command.items.min() < 0 or command.prefix_of.min() < -1):
        raise WireError("an item or prefix index is negative")
    if len(command.items) and command.prefix_of.max() >= len(command.prefixes):
        raise WireError(
            f"prefix index {command.prefix_of.max()} is out of range of {len(command.prefixes)} prefixes"
        )
    return command


def _build_from(value: object) -> Build:
    digest, parent, source, begin, end = record(value, 5)
    build = Build(
        digest_from(digest), digest_from(parent, or_empty=True), counted(source), counted(begin), counted(end)
    )
    if build.begin >= build.end:
        raise WireError(f"a build of ids {build.begin} to {build.end} is empty")
    return build


def encode_ack(ack: Ack) -> bytes:
    """An acknowledgement as bytes."""
    built = [[digest, size_bytes] for digest, size_bytes in ack.built]
    fields: list[object] = [ack.epoch, ack.sequence, ack.refused, built, ack.total_bytes, ack.table]
    return pack("ack", [*fields, ack.rows, ack.seconds, ack.failed])


def decode_ack(message: bytes) -> Ack:
    """An acknowledgement from bytes. Raises WireError."""
    epoch, sequence, refused, built, total_bytes, table, rows, seconds, failed = unpack("ack", message, 9)
    pairs = [record(entry, 2) for entry in listed(built)]
    if not math.isfinite(typed(seconds, float)) or seconds < 0:
        raise WireError(f"expected a time in seconds, got {seconds}")
    return Ack(
        epoch=counted(epoch),
        sequence=counted(sequence),
        refused=typed(refused, str),
        built=tuple((digest_from(digest), counted(size_bytes)) for digest, size_bytes in pairs),
        total_bytes=counted(total_bytes),
        table=digest_from(table),
        rows=counted(rows),
        seconds=seconds,
        failed=counted(failed),
    )


def encode_result(result: Result) -> bytes:
    """The scores of one command as bytes."""
    arrays = [array_fields(a) for a in (result.items, result.logprobs, result.greedy, result.offsets)]
    failures = [[f.item, f.error_class, f.message] for f in result.failures]
    if result.depths is None:
        return pack("result", [*arrays, failures])
    depths = [array_fields(result.depths), result.row_loops, result.full_row_loops]
    return pack("result", [*arrays, failures, *depths], VERSION)


def decode_result(message: bytes) -> Result:
    """The scores of one command from bytes. Raises WireError."""
    items, logprobs, greedy, offsets, failures, *depth_fields = unpack("result", message, 5, optional=3)
    records = [record(failure, 3) for failure in listed(failures)]
    depths, row_loops, full_row_loops = depth_fields if depth_fields[0] is not None else (None, 0, 0)
    result = Result(
        items=array_from(items, "<i4"),
        logprobs=array_from(logprobs, "<f4"),
        greedy=array_from(greedy, "|b1"),
        offsets=array_from(offsets, "<i8"),
        failures=tuple(
            ItemFailure(counted(i), typed(kind, str), typed(text, str)) for i, kind, text in records
        ),
        depths=None if depths is None else array_from(depths, "<i4"),
        row_loops=counted(row_loops),
        full_row_loops=counted(full_row_loops),
    )
    if result.depths is not None and len(result.depths) != len(result.items):
        raise WireError(f"{len(result.depths)} depths for {len(result.items)} items")
    if len(result.offsets) != len(result.items) + 1 or result.offsets[0] != 0:
        raise WireError(f"{len(result.offsets)} offsets for {len(result.items)} items")
    if (result.offsets[1:] < result.offsets[:-1]).any() or result.offsets[-1] != len(result.logprobs):
        raise WireError("offsets do not cover the log-probabilities in order")
    if len(result.greedy) != len(result.logprobs):
        raise WireError(f"{len(result.greedy)} greedy flags for {len(result.logprobs)} log-probabilities")
    return result


def encode_inventory(inventory: Inventory) -> bytes:
    """What a replica holds as bytes."""
    entries = [[e.digest, e.parent, e.length, e.depth, e.size_bytes] for e in inventory.entries]
    return pack("inventory", [inventory.epoch, entries, inventory.total_bytes])


def decode_inventory(message: bytes) -> Inventory:
    """What a replica holds from bytes. Raises WireError."""
    epoch, entries, total_bytes = unpack("inventory", message, 3)
    return Inventory(
        counted(epoch), tuple(_held_from(entry) for entry in listed(entries)), counted(total_bytes)
    )


def _held_from(value: object) -> HeldPrefix:
    digest, parent, length, depth, size_bytes = record(value, 5)
    return HeldPrefix(
        digest_from(digest),
        digest_from(parent, or_empty=True),
        counted(length),
        counted(depth),
        counted(size_bytes),
    )
