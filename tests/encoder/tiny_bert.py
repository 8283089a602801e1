"""The tiny bert fixture as tensors, and as a model directory with a WordPiece tokenizer of its 320 ids."""

import hashlib
import json
import string
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from libcolibri.format import DENSE_NAME, FileEntry, Manifest, TensorEntry, write_manifest
from libcolibri.quant import FORMATS
from libcolibri.safetensors_header import read_header

FOLDER = Path(__file__).parent.parent / "fixtures" / "tiny" / "bert"
CLS, SEP, UNK = 1, 2, 3
WORDS = ["the", "expert", "cache", "keeps", "a", "matrix", "of", "disk", "memory", "模", "型", "专", "家", "。", ".", ","]


def read_tensors(folder: Path = FOLDER) -> dict[str, np.ndarray]:
    """Every tensor as float32."""
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    tensors = {}
    for name, slot in read_header(path).items():
        data = np.frombuffer(raw, np.uint8, slot.nbytes, slot.start)
        if slot.dtype == "BF16":
            data = (data.view(np.uint16).astype(np.uint32) << 16).view(np.uint8)
        tensors[name] = data.view(np.float32).reshape(slot.shape)
    return tensors


def read_config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())


def oracle() -> dict[str, np.ndarray]:
    """ids (T,), last_hidden (T, D), embedding (D,): the text without the padding that the reference was given."""
    with np.load(FOLDER / "oracle.npz") as file:
        real = file["attention_mask"][0].astype(bool)
        return {"ids": file["input_ids"][0][real], "last_hidden": file["last_hidden"][real], "embedding": file["embedding"]}


def tokenizer_json() -> bytes:
    """WordPiece over ASCII characters, a few words, and fillers up to 320 ids."""
    pieces = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", *WORDS]
    for character in string.ascii_lowercase + string.digits:
        pieces += [piece for piece in (character, "##" + character) if piece not in pieces]
    pieces += [f"[unused{i}]" for i in range(320 - len(pieces))]
    special = [{"id": i, "content": pieces[i], "special": True, "normalized": False} for i in range(5)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False}
    return json.dumps(
        {
            "version": "1.0",
            "truncation": {"max_length": 8, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 8}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "[PAD]"},
            "added_tokens": [token | flags for token in special],
            "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "lowercase": True},
            "pre_tokenizer": {"type": "BertPreTokenizer"},
            "post_processor": None,
            "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True},
            "model": {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": {piece: i for i, piece in enumerate(pieces)},
            },
        }
    ).encode()


def write_model(
    folder: Path, kind: str = "f32", config: dict | None = None, tensors: dict | None = None, family: str = "bert"
) -> Path:  # fmt: skip
    """A model directory with every matrix in tensor type `kind`."""
    folder.mkdir(exist_ok=True)
    stored, entries = {}, {}
    for name, tensor in (read_tensors() if tensors is None else tensors).items():
        if tensor.ndim == 2:
            stored[name] = FORMATS[kind].quantize(tensor)
        else:
            stored[name] = tensor
        entries[name] = TensorEntry(kind if tensor.ndim == 2 else "f32", tensor.shape)
    save_file(stored, folder / DENSE_NAME)
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    files = {}
    for name in (DENSE_NAME, "tokenizer.json"):
        data = (folder / name).read_bytes()
        files[name] = FileEntry(len(data), hashlib.sha256(data).hexdigest())
    manifest = Manifest(
        kind="encoder",
        family=family,
        config=read_config() | (config or {}),
        quantization={"recipe": kind},
        tensors=entries,
        experts={},
        tokenizer={"file": "tokenizer.json", "bos_token_id": None, "eos_token_ids": [], "add_bos": False},
        files=files,
        source={"name": "bert"},
        converter_version="0",
    )
    write_manifest(folder, manifest)
    return folder
