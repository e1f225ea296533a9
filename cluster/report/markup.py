"""HTML and SVG as text that is escaped unless it was made here. Pure.

Invariant: whatever a row, a file name or an error message holds, it can neither end an element nor reorder
the text around it.
"""

from __future__ import annotations

import re
import unicodedata

# Elements of HTML that have no end tag.
_VOID = frozenset({"meta", "br", "hr"})


class Markup(str):
    """Text that is HTML already."""

    __slots__ = ()


def shown(text: str) -> str:
    """Text with every character that is not seen, or that turns others round, spelled out as an escape."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(character if _is_seen(character) else _spelled(character) for character in text)


def cut(text: str, most: int) -> str:
    """At most so many characters; an ellipsis says that there were more."""
    return text if len(text) <= most else text[: most - 1] + "…"


def escape(text: str) -> Markup:
    """Text as HTML, in an element or between the quotes of an attribute."""
    if isinstance(text, Markup):
        return text
    escaped = shown(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return Markup(escaped.replace('"', "&quot;").replace("'", "&#39;"))


def join(parts: list[str]) -> Markup:
    """Parts one after the other, each escaped unless it is markup."""
    return Markup("".join(escape(part) for part in parts))


def tag(name: str, /, *children: str, **attributes: str | float | None) -> Markup:
    """An element. class_ is class, x_y is x-y; an attribute that is None is left out."""
    shown_attributes = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escape(_number(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Markup(f"<{name}{shown_attributes}>")
    return Markup(f"<{name}{shown_attributes}>{join(list(children))}</{name}>")


def prose(text: str) -> Markup:
    """A sentence in which no option, such as --resume, is broken between its hyphens."""
    words = re.split(r"(--[a-z][a-z-]*)", text)
    return join([tag("span", word, class_="flag") if word.startswith("--") else word for word in words])


def _number(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _is_seen(character: str) -> bool:
    # Line ends are what HTML makes of them; other separators and every control or format character are not.
    return character in " \n" or unicodedata.category(character)[0] not in "CZ"


def _spelled(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
