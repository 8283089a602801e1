"""The Python programs in the documents run: on tiny models that stand at the paths they name."""

import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
from colibri_converter import convert

from libcolibri.engine import Engine
from tests.encoder import tiny_bert

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "data" / "docs" / "en" / "embedding-in-python.md", ROOT / "data" / "docs" / "zh" / "在程序中使用.md"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}<|quiet|>{% endif %}<|assistant|>"
)
NOTES = "# Memory\n\nMemory is limited by the memory limit: the expert cache holds no more than the limit.\n"


def blocks() -> list[tuple[str, str]]:
    found = []
    for page in [*PAGES, ROOT / "README.md", ROOT / "README.zh-CN.md"]:
        codes = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
        found += [(f"{page.name} {number}", code) for number, code in enumerate(codes, start=1)]
    return found


def byte_tokenizer() -> str:
    """A tokenizer.json of one token a byte, as far as the tiny model's vocabulary goes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    characters = [
        chr(byte) if byte in shown else chr(256 + n) for n, byte in enumerate([*(b for b in range(256) if b not in shown), *shown])
    ]
    vocab = {character: i for i, character in enumerate(sorted(set(characters)))}
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"dropout": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "post_processor": None}
    return json.dumps(parts | {"pre_tokenizer": level, "decoder": level, "model": model})


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    """Path in the documents -> a tiny model that stands for it."""
    folder = tmp_path_factory.mktemp("models")
    shutil.copytree(ROOT / "tests" / "fixtures" / "tiny" / "qwen3_moe", folder / "hf")
    config = json.loads((folder / "hf" / "config.json").read_text())
    (folder / "hf" / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (folder / "hf" / "tokenizer.json").write_text(byte_tokenizer())
    (folder / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    convert(folder / "hf", folder / "mymodel", quant="q8_0")
    e5 = tiny_bert.write_model(folder / "e5")
    return {
        "/models/mymodel": folder / "mymodel",
        "/models/multilingual-e5-small": e5,
        "/path/to/model-directory": folder / "mymodel",
        "/path/to/embedder": e5,
    }


@pytest.mark.parametrize(("where", "code"), blocks(), ids=lambda value: value if len(value) < 60 else "")
def test_a_program_in_the_documents_runs(where, code, models, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "notes.md").write_text(NOTES)
    for path, folder in models.items():
        code = code.replace(f'"{path}"', repr(str(folder)))
    code = re.sub(r"max_tokens=\d+", "max_tokens=8", code)
    exec(compile(code, where, "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_argument_of_open_is_described_with_its_default(page):
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", page.read_text(encoding="utf-8"), re.MULTILINE)
    described = dict(rows)
    arguments = inspect.signature(Engine.open).parameters
    assert set(described) == set(arguments) - {"path", "parts"}
    for name, text in described.items():
        default = arguments[name].default
        expected = {"": "", "()": "none|无"}.get(str(default), re.escape(str(default)))
        assert re.match(rf'[`"]*(?:{expected})', text), f"{name}: the page says {text}, the library has {default!r}"
