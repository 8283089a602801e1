"""Bytes of an untrusted file to clean text.

In:  bytes
Out: str without control characters, escape sequences or invisible directives; the encoding's name

Order: byte order mark, UTF-8, the charset an HTML file declares, gb18030, charset-normalizer's guess.
"""

import codecs
import re

from charset_normalizer import from_bytes

# Longest first: the UTF-32-LE mark begins with the UTF-16-LE one.
BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

MAGIC = (
    (b"%PDF-", "a PDF file"),
    (b"PK\x03\x04", "a zip archive or office file"),
    (b"\x7fELF", "a program"),
    (b"MZ\x90", "a Windows program"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"\x1f\x8b", "gzip data"),
    (b"BZh", "bzip2 data"),
    (b"\xfd7zXZ", "xz data"),
    (b"(\xb5/\xfd", "zstd data"),
    (b"SQLite format 3\x00", "a SQLite database"),
    (b"GGUF", "a GGUF model"),
    (b"\xd0\xcf\x11\xe0", "an old office file"),
)

_CONTROL_BYTES = bytes(b for b in range(32) if b not in b"\t\n\r\f\x08\x1b") + b"\x7f"
MAX_CONTROL_SHARE = 0.005  # of all bytes; text has none, random bytes have 10 %
_SNIFF_BYTES = 1 << 16
WESTERN_MARGIN = 0.1  # of charset-normalizer's measure of mess, 0 to 1

# Colours and cursor movements (CSI), titles and links (OSC, which end with BEL or ST; bounded so that a lone one eats no text).
_ESCAPE_SEQUENCE = re.compile(r"\x1b\[[0-?]{0,64}[ -/]{0,8}[@-~]|\x1b[\]PX^_][^\x07\x1b\n]{0,2048}(?:\x07|\x1b\\)|\x1b[ -/]{0,2}[0-~]")
# C0 and C1 controls, bidirectional overrides (they make text look like other text), invisible separators and tag characters
# (they hide instructions), lone surrogates, noncharacters. Joiners stay: emoji and Persian need them.
_UNWANTED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u200b\u202a-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ufdd0-\ufdef\ufffe\uffff"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
_HAN = r"[\u3400-\u4dbf\u4e00-\u9fff]"
_LATIN_GLUED_HAN = re.compile(rf"[A-Za-z]{_HAN}|{_HAN}[A-Za-z]")
_HAN_CHARACTER = re.compile(_HAN)


class NotTextError(ValueError):
    """The bytes are no text; the message is the reason."""


def clean_text(text: str) -> str:
    """Remove escape sequences and control characters; line ends become "\\n"."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\x0b", "\n").replace("\x0c", "\n")
    text = text.replace("\x85", "\n").replace("\u2028", "\n").replace("\u2029", "\n")
    if "\x08" in text:  # man pages overstrike: "N\bNA" is a bold N
        text = re.sub(r"[^\n]\x08", "", text)
    if "\x1b" in text:
        text = _ESCAPE_SEQUENCE.sub("", text)
    return _UNWANTED.sub("", text)


def decode_bytes(data: bytes, declared: str | None = None) -> tuple[str, str]:
    """Decode the bytes of a text file.

    Parameters
    ----------
    data : the whole file
    declared : charset named inside the file (HTML's meta), tried after UTF-8

    Returns the cleaned text and the name of the encoding. Raises NotTextError with the reason.
    """
    for mark, encoding in BYTE_ORDER_MARKS:
        if data.startswith(mark):
            return _decode_marked(data[len(mark) :], encoding)
    _refuse_binary(data)
    for candidate in ("utf-8", declared):
        text = _try_decode(data, candidate)
        if text is not None:
            return clean_text(text), str(candidate)
    text = _try_decode(data, "gb18030")
    if text is not None and _plausible_chinese(text):
        return clean_text(text), "gb18030"
    return _decode_guessed(data)


def _decode_marked(data: bytes, encoding: str) -> tuple[str, str]:
    try:
        return clean_text(data.decode(encoding)), encoding
    except UnicodeDecodeError as error:
        raise NotTextError(f"starts with the byte order mark of {encoding} but is not valid {encoding} at byte {error.start}") from error


def _refuse_binary(data: bytes) -> None:
    for magic, what in MAGIC:
        if data.startswith(magic):
            raise NotTextError(f"is {what}, not text")
    if b"\0" in data:
        raise NotTextError("contains NUL bytes: binary data, or UTF-16 without a byte order mark; save it as UTF-8")
    controls = len(data) - len(data.translate(None, _CONTROL_BYTES))
    if controls > MAX_CONTROL_SHARE * len(data) + 4:
        raise NotTextError(f"contains {controls} control bytes among {len(data)}: binary data")


def _try_decode(data: bytes, encoding: str | None) -> str | None:
    if encoding is None:
        return None
    try:
        return data.decode(encoding)
    except (UnicodeDecodeError, LookupError):  # LookupError: an HTML file may declare any word as its charset
        return None


def _plausible_chinese(text: str) -> bool:
    """Latin-1 text often decodes as gb18030 too, but then its Han characters stand inside Latin words ("caf" + Han)."""
    n_han = len(_HAN_CHARACTER.findall(text))
    return n_han > 0 and len(_LATIN_GLUED_HAN.findall(text)) <= 0.5 * n_han


def _decode_guessed(data: bytes) -> tuple[str, str]:
    guesses = from_bytes(data[:_SNIFF_BYTES])
    guess = guesses.best()
    if guess is None:
        raise NotTextError("is in no encoding that could be recognised; save it as UTF-8")
    # Baltic, Turkish and other Latin pages fit Western text nearly as well; Western Europe's is the likelier by far.
    western = [other for other in guesses if other.encoding == "cp1252" and other.chaos <= guess.chaos + WESTERN_MARGIN]
    if western and "Cyrillic" not in guess.alphabets and western[0].coherence >= guess.coherence:
        guess = western[0]
    text = _try_decode(data, guess.encoding)
    if text is None:
        raise NotTextError(f"looks like {guess.encoding} but is not valid in it; save it as UTF-8")
    return clean_text(text), guess.encoding
