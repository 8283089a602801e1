"""Embeddings: texts in, float32 vectors of length 1 out, on the same kernels as the decoder.

In:  a model directory of kind "encoder" (made by colibri-convert), texts
Out: (N, dimension) float32; neither the other texts of a call nor the number of threads change a bit of a vector
"""

import hashlib
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from .errors import ConfigError, FormatError, TokenizerError
from .format import DENSE_NAME, MANIFEST_NAME, Manifest, check_files, read_manifest
from .kernels.kernel_set import KernelSet
from .matrix import Matrix
from .models.encoder import EncoderConfig, EncoderProgram, EncoderWeights, bind_encoder, parse_encoder_config
from .safetensors_reader import read_arrays
from .thread_team import Team
from .tokenizer import Tokenizer

BATCH_TOK = 512  # of one run: enough to load every weight rarely, little enough for the activations to stay in cache
FRAMES = (("[CLS]", "[SEP]"), ("<s>", "</s>"))  # what BERT's and XLM-RoBERTa's vocabularies put around a text


class TextTokenizer(Protocol):
    """What an encoder needs of a tokenizer; libcolibri.Tokenizer has it."""

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def token_id(self, token: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class EncodedText:
    """The token ids of a text as the model takes them, start and end tokens included.

    dropped_tok is how many tokens of the text were cut off to fit max_tok: 0 when nothing was.
    """

    ids: tuple[int, ...]
    dropped_tok: int = 0


class Encoder:
    """One loaded embedding model; may be shared between threads, which then take turns.

    dimension                     length of a vector
    max_tok                       longest text in tokens, start and end tokens included; longer ones are cut (see `encode`)
    query_prefix, passage_prefix  what the model wants in front of questions and of passages; `embed` adds nothing itself
    fingerprint                   identifies whatever decides a vector: weights, tokenizer, pooling
    """

    def __init__(
        self, config: EncoderConfig, weights: EncoderWeights, tokenizer: TextTokenizer, fingerprint: str, threads: int | None = None
    ):
        self.config, self.fingerprint = config, fingerprint
        self.dimension, self.max_tok = config.hidden_size, config.max_tok
        self.query_prefix, self.passage_prefix = config.query_prefix, config.passage_prefix
        self.threads = _usable_cores() if threads is None else threads
        if self.threads < 1:
            raise ConfigError(f"threads is {threads}, expected at least 1")
        self._tokenizer = tokenizer
        self._first_id, self._last_id = _frame_of(tokenizer)
        self._lock = threading.Lock()
        self._program = EncoderProgram(config, weights, max(BATCH_TOK, self.max_tok), self.threads, KernelSet())
        self._team = Team(self.threads)
        self._closed = False

    @classmethod
    def open(cls, path: str | Path, threads: int | None = None) -> "Encoder":
        """Load a model directory of kind "encoder"; threads: None takes every core this process may use.

        Raises FormatError for a damaged or foreign directory, ConfigError for a model whose equations are not supported.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        if manifest.kind != "encoder":
            raise FormatError(f"{folder}: a {manifest.kind}, expected an encoder: give a model directory made from an embedding model")
        check_files(folder, manifest)
        if manifest.tokenizer is None:
            raise TokenizerError(f"{folder}: the model has no tokenizer: convert it again from a folder that has tokenizer.json")
        config = parse_encoder_config(manifest.config, manifest.family)
        weights = bind_encoder(_read_dense(folder, manifest), config, str(folder / DENSE_NAME))
        tokenizer = Tokenizer.load(folder, manifest.tokenizer)
        return cls(config, weights, tokenizer, _fingerprint(manifest, config), threads)

    def __enter__(self) -> "Encoder":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the threads; waits for a running `embed`."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._team.close()

    def encode(self, text: str) -> EncodedText:
        """Token ids of a text, cut to max_tok; control tokens spelled out in the text stay text."""
        content = self._tokenizer.encode(text)
        kept = content[: self.max_tok - 2]
        return EncodedText((self._first_id, *kept, self._last_id), len(content) - len(kept))

    def count_tok(self, text: str) -> int:
        """Tokens that a text takes up, start and end tokens included: it is embedded whole if this is at most max_tok."""
        return len(self._tokenizer.encode(text)) + 2

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """Vectors (len(texts), dimension) float32 of length 1, in the order of the texts."""
        if isinstance(texts, str):
            raise ConfigError("embed takes a list of texts, not one text: put it into a list")
        return self.embed_encoded([self.encode(text) for text in texts])

    def embed_encoded(self, texts: Sequence[EncodedText]) -> np.ndarray:
        """`embed` for texts that `encode` has already cut into tokens."""
        vectors = np.empty((len(texts), self.dimension), np.float32)
        for batch in _batches([len(text.ids) for text in texts], self._program.capacity_tok):
            with self._lock:
                if self._closed:
                    raise ConfigError("the encoder is closed: open it again")
                vectors[batch] = self._program.run(self._team, [texts[i].ids for i in batch])
        return vectors


def _batches(lengths: Sequence[int], capacity_tok: int) -> list[list[int]]:
    """Indices of texts in batches of at most capacity_tok tokens, like lengths together, so that threads get even shares."""
    batches: list[list[int]] = []
    room = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if lengths[i] > room:
            batches.append([])
            room = capacity_tok
        batches[-1].append(i)
        room -= lengths[i]
    return batches


def _frame_of(tokenizer: TextTokenizer) -> tuple[int, int]:
    """The ids that stand before and behind every text."""
    for first, last in FRAMES:
        first_id, last_id = tokenizer.token_id(first), tokenizer.token_id(last)
        if first_id is not None and last_id is not None:
            return first_id, last_id
    raise TokenizerError("the tokenizer has neither [CLS] and [SEP] nor <s> and </s>: it does not belong to a BERT or XLM-RoBERTa model")


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_dense(folder: Path, manifest: Manifest) -> Mapping[str, Matrix | np.ndarray]:
    """Every tensor of dense.safetensors (check_files has compared it with the manifest): matrices in tiles, vectors float32."""
    stored, _ = read_arrays(folder / DENSE_NAME)
    return {
        name: Matrix(entry.type, *entry.shape, stored[name]) if len(entry.shape) == 2 else stored[name]
        for name, entry in manifest.tensors.items()
    }


def _fingerprint(manifest: Manifest, config: EncoderConfig) -> str:
    """sha256 over the files' own hashes and the settings; the converter's version and dates do not count."""
    digest = hashlib.sha256(repr(config).encode())
    for name, entry in sorted(manifest.files.items()):
        if name != MANIFEST_NAME:
            digest.update(f"{name} {entry.sha256}\n".encode())
    return digest.hexdigest()[:32]
