"""Text that is safe to show on a terminal.

In: model output, document text, file names (all untrusted).  Out: the same text without anything a terminal would obey.
"""

import json
import re
from typing import Any

_REPLACED: dict[int, str | None] = (
    {code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t\r"}  # ESC becomes its visible picture, and so on
    | {0x0D: None, 0x7F: "\u2421"}  # a lone carriage return would overwrite what stands before it
    | dict.fromkeys(range(0x80, 0xA0), "\ufffd")  # the 8-bit forms of escape sequences
    | dict.fromkeys((*range(0x202A, 0x202F), *range(0x2066, 0x206A), 0x200E, 0x200F, 0x061C), "\ufffd")  # direction overrides
    | dict.fromkeys(range(0xD800, 0xE000), "\ufffd")  # lone surrogates (undecodable file names) cannot be written as UTF-8
    | {0x2028: "\n", 0x2029: "\n"}
)
_JSON_ESCAPED = {code: f"\\u{code:04x}" for code, seen in _REPLACED.items() if code >= 0x7F and seen is not None}


def neutralise(text: str) -> str:
    """`text` with control, escape and direction characters replaced by visible ones; newlines and tabs stay.

    Works on single characters, so that a sequence cut in two by streaming is caught as well.
    """
    return text.translate(_REPLACED)


def one_line(text: str, limit: int | None = None) -> str:
    """`text` neutralised, on one line, at most `limit` characters long (an ellipsis marks the cut)."""
    line = re.sub(r"\s+", " ", neutralise(text)).strip()
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def to_json(value: Any) -> str:
    """One line of JSON in readable Unicode, with terminal control characters escaped."""
    return json.dumps(value, ensure_ascii=False, default=_plain).translate(_JSON_ESCAPED)


def _plain(value: Any) -> Any:
    """What json cannot write by itself: paths, sets, tuples of other libraries, numpy scalars."""
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    return str(value)


def readable_bytes(count: float) -> str:
    """1536 -> '1.5 kB', as the memory plan writes sizes (powers of 1000)."""
    from libcolibri.memory_plan import size_text  # only once there is a size to show: --help needs no core

    return size_text(int(count))
