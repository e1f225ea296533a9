"""Lines of JSON to rows of a table and back: the same fields, but that null and absent are one."""

from __future__ import annotations

import json
from typing import Any

from .schema import MORE, Schema, fits

Fields = dict[str, Any]


def to_row(line: bytes, schema: Schema) -> Fields:
    """One value a column; JSON columns as text. What has no column, or does not fit into it, is in `more`."""
    fields = json.loads(line)
    row: Fields = dict.fromkeys(schema)
    more: Fields = {}
    for name, value in fields.items():
        kind = schema.get(name)
        if kind is None or name == MORE or not fits(value, kind):
            more[name] = value
        else:
            row[name] = json.dumps(value) if kind == "json" and value is not None else value
    if more:
        row[MORE] = json.dumps(more)
    return row


def of_row(row: Fields, schema: Schema) -> Fields:
    """The fields of a line, but for nulls."""
    fields: Fields = {}
    for name, value in row.items():
        if value is None:
            continue
        if schema[name] == "json":
            value = json.loads(value)
        if name == MORE:
            fields |= value
        else:
            fields[name] = without_nulls(value)
    return fields


def without_nulls(value: Any) -> Any:
    """A value of a struct column without the fields that are null."""
    if isinstance(value, dict):
        return {name: without_nulls(one) for name, one in value.items() if one is not None}
    return [without_nulls(one) for one in value] if isinstance(value, list) else value
