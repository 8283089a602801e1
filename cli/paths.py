"""The user's folder, and what a model argument means.

In: $COLIBRI_HOME (default ~/.colibri) and names given on the command line.  Out: paths that exist, or one line saying what is
missing and which command makes it.

    home/models/<name>/          model directories
    home/models/default-chat     text file: path of the chat model's directory
    home/models/default-embed    text file: path of the embedder's directory
    home/kb/default/             the default knowledge base (kb.sqlite, kb.faiss)
    home/history, home/conversations/<name>.json
    home/usage/                  how often each model's experts were used
    home/drives.json             how each drive is read fastest
"""

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

DEMO = "`python3 bootstrap.py demo` makes one"


@dataclass(frozen=True, slots=True)
class Home:
    """The folder that holds a user's models, knowledge bases and history."""

    folder: Path

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> "Home":
        """The folder named by COLIBRI_HOME, else ~/.colibri; it need not exist."""
        chosen = environ.get("COLIBRI_HOME")
        return cls(Path(chosen).expanduser() if chosen else Path.home() / ".colibri")

    @property
    def models(self) -> Path:
        return self.folder / "models"

    @property
    def default_knowledge_base(self) -> Path:
        return self.folder / "kb" / "default"

    @property
    def history_file(self) -> Path:
        return self.folder / "history"

    @property
    def conversations(self) -> Path:
        return self.folder / "conversations"

    @property
    def usage(self) -> Path:
        return self.folder / "usage"

    @property
    def drives(self) -> Path:
        return self.folder / "drives.json"

    def make_usage(self) -> Path:
        """`usage`, made where that is possible; elsewhere the engine remarks that nothing is remembered."""
        with contextlib.suppress(OSError):
            self.usage.mkdir(parents=True, exist_ok=True)
        return self.usage

    def chat_model(self, chosen: str | None = None) -> Path:
        """The model directory to chat with: `chosen` (a path, or a name in home/models), else the default.

        Raises
        ------
        ConfigError
            Nothing is there; the message says which command makes it.
        """
        return self.model(chosen) if chosen else self._default("default-chat", "chat model", "--model")

    def embedder(self, chosen: str | None = None) -> Path:
        """The embedder's model directory: `chosen`, else the default. Raises ConfigError as `chat_model` does."""
        return self.model(chosen) if chosen else self._default("default-embed", "embedder", "--embedder")

    def model(self, chosen: str) -> Path:
        """The model directory that `chosen` means: a path, or the name of a folder in home/models."""
        if "://" in chosen:
            _refuse(f"{chosen} is an address: colibri never downloads; fetch the model, then `colibri-convert --input FOLDER --output DIR`")
        path = Path(chosen).expanduser()
        if not path.exists() and (self.models / chosen).is_dir():
            path = self.models / chosen
        if not path.exists():
            names = ", ".join(found.name for found in self.model_directories()) or "no models"
            _refuse(f"no model at {path}, and {self.models} has {names}: give a model directory made by `colibri-convert`")
        return check_model(path)

    def model_directories(self) -> list[Path]:
        """The converted models in home/models, by name."""
        return sorted(path.parent for path in self.models.glob("*/colibri.json")) if self.models.is_dir() else []

    def knowledge_base(self, chosen: str | None = None) -> Path:
        """The folder of an existing knowledge base; raises ConfigError when nothing was ingested into it."""
        folder = Path(chosen).expanduser() if chosen else self.default_knowledge_base
        if not (folder / "kb.sqlite").is_file():
            option = f" --kb {chosen}" if chosen else ""
            _refuse(f"no knowledge base in {folder}: `colibri-ingest PATH{option}` makes one; --no-rag chats without documents")
        return folder

    def _default(self, name: str, what: str, option: str) -> Path:
        pointer = self.models / name
        if not pointer.is_file():
            _refuse(f"no {what}: {pointer} does not exist; {DEMO}, or name a model directory with {option}")
        target = Path(pointer.read_text(encoding="utf-8").strip()).expanduser()
        path = target if target.is_absolute() else self.models / target
        if not path.is_dir():
            _refuse(f"{pointer} names {path}, which does not exist; {DEMO}, or name a model directory with {option}")
        return check_model(path)


def check_model(path: Path) -> Path:
    """`path` if it is a converted model directory, else a ConfigError that says what it is and what to run."""
    if (path / "colibri.json").is_file():
        return path
    if not path.exists():
        _refuse(f"no model at {path}: give a model directory made by `colibri-convert`")
    if path.is_file():
        hint = (
            f"`colibri-convert --input {path} --output DIR` makes one of a GGUF file"
            if path.suffix == ".gguf"
            else "give the folder, not a file"
        )
        _refuse(f"{path} is a file, expected a model directory: {hint}")
    if (path / "config.json").is_file() or any(path.glob("*.safetensors")):
        _refuse(f"{path} is not converted yet (no colibri.json): run `colibri-convert --input {path} --output DIR`")
    _refuse(f"{path} is not a model directory (no colibri.json): give one made by `colibri-convert`")


def _refuse(message: str) -> NoReturn:
    from libcolibri.errors import ConfigError

    raise ConfigError(message)
