"""Text to token ids and back.

In: a tokenizer file of a model directory (tokenizer.json, or a SentencePiece .model). Out: ids, text, and text as it streams.
"""

import codecs
import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from .errors import TokenizerError
from .tokenizer_json import JsonEncoder, parse_tokenizer_json
from .tokenizer_pieces import PieceTable
from .tokenizer_sentencepiece import AddedToken, SentencePieceEncoder, added_tokens_beside


@contextmanager
def _collector_paused() -> Iterator[None]:
    """No garbage collection: it would walk half a million new pairs again and again, which doubles the time of a large vocabulary."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class _Encoder(Protocol):
    control_ids: frozenset[int]

    def encode(self, text: str, special: bool) -> list[int]: ...


class Tokenizer:
    """The tokenizer of one model; immutable, may be shared between threads.

    Attributes
    ----------
    vocab_size : int, highest id + 1 (the embedding matrix may have more rows)
    bos_token_id : int | None
    eos_token_ids : frozenset[int], every id that ends an answer
    add_bos : bool, whether a prompt starts with the BOS token
    control_ids : frozenset[int], ids that plain text never yields
    """

    def __init__(
        self,
        encoder: _Encoder,
        pieces: PieceTable,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: Iterable[int] = (),
        add_bos: bool = False,
    ):
        self._encoder, self._pieces = encoder, pieces
        self.vocab_size = pieces.size
        self.bos_token_id, self.eos_token_ids, self.add_bos = bos_token_id, frozenset(eos_token_ids), add_bos
        self.control_ids = encoder.control_ids

    @classmethod
    def load(cls, model_dir: str | Path, entry: Mapping[str, Any]) -> "Tokenizer":
        """Open the tokenizer of a model directory.

        entry: the manifest's "tokenizer": file, bos_token_id, eos_token_ids, add_bos. Raises TokenizerError.
        """
        name = entry.get("file")
        if not isinstance(name, str) or Path(name).name != name or "\\" in name:
            raise TokenizerError(f"{model_dir}: tokenizer file is {name!r}, expected a file name without folders; convert the model again")
        path = Path(model_dir) / name
        try:
            data = path.read_bytes()
        except OSError as error:
            raise TokenizerError(f"{path}: cannot be read ({error.strerror}); convert the model again") from error
        keys = {
            "bos_token_id": entry.get("bos_token_id"),
            "eos_token_ids": entry.get("eos_token_ids") or (),
            "add_bos": bool(entry.get("add_bos")),
        }
        try:
            if path.suffix == ".model":
                return cls.from_sentencepiece(data, added_tokens_beside(Path(model_dir)), **keys)
            return cls.from_json(data, **keys)
        except TokenizerError as error:
            raise TokenizerError(f"{path}: {error}") from error

    @classmethod
    def from_json(cls, data: bytes, **keys: Any) -> "Tokenizer":
        """From the bytes of a Hugging Face tokenizer.json (BPE, WordPiece or Unigram)."""
        with _collector_paused():
            tokenizer = parse_tokenizer_json(data)
            pieces = PieceTable.from_tokenizer_json(tokenizer)
            return cls(JsonEncoder(tokenizer), pieces, **keys)

    @classmethod
    def from_sentencepiece(cls, data: bytes, added: Sequence[AddedToken] = (), **keys: Any) -> "Tokenizer":
        """From the bytes of a SentencePiece .model, and tokens that other files add to it."""
        encoder = SentencePieceEncoder(data, added)
        return cls(encoder, encoder.pieces(), **keys)

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        """Token ids of a text, without BOS.

        special=False: control tokens spelled out in the text stay text. special=True: they become control ids; only for
        text a chat template made. Raises TokenizerError for text that is no Unicode (lone surrogates).
        """
        try:
            return self._encoder.encode(text, special)
        except UnicodeEncodeError as error:
            raise TokenizerError(f"the text has a lone surrogate at character {error.start}: it is not valid Unicode") from error

    def with_bos(self, ids: Sequence[int]) -> list[int]:
        """ids with BOS in front when the model wants it (add_bos) and a chat template has not already written it."""
        if not self.add_bos or self.bos_token_id is None or (ids and ids[0] == self.bos_token_id):
            return list(ids)
        return [self.bos_token_id, *ids]

    def decode(self, ids: Iterable[int], *, special: bool = False) -> str:
        """Text of token ids; equals what a stream gives for them.

        Control tokens are left out unless special=True. Bytes that are no UTF-8 become U+FFFD, an unfinished last
        character is left out.
        """
        stream = self.stream(special=special)
        return "".join([*map(stream.push, ids), stream.flush()])

    def stream(self, *, special: bool = False, shown: Iterable[str] = ()) -> "TextStream":
        """A decoder that takes ids one by one.

        special: control tokens are text too. shown: spellings of control tokens that are text although others are not.
        """
        wanted = set(shown)
        kept = {i for i in self._pieces.hidden if self._pieces.spelling(i) in wanted} if wanted else set()
        return TextStream(self._pieces, frozenset() if special else self._pieces.hidden - kept)

    def bytes_of(self, token_id: int) -> bytes:
        """UTF-8 of one token inside a text; may be part of a character, empty for an id without a token."""
        return self._pieces.bytes_of(token_id)

    def spelling(self, token_id: int) -> str | None:
        """A token as the vocabulary writes it, None for an id without a token."""
        return self._pieces.spelling(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of a token by its spelling in the vocabulary, None when there is no such token."""
        return self._pieces.id_of(token)


class TextStream:
    """Text of ids that arrive one by one; only whole characters come out."""

    def __init__(self, pieces: PieceTable, hidden: frozenset[int]):
        self._pieces, self._hidden = pieces, hidden
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = pieces.strip

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; "" while a character is unfinished."""
        if token_id in self._hidden:
            return ""
        data = self._pieces.bytes_of(token_id)
        if self._at_start and data:
            self._at_start, data = False, data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """End the text: what is left is an unfinished character, which is dropped, so always ""; the stream starts anew."""
        self._utf8.reset()
        self._at_start = self._pieces.strip
        return ""
