"""The rules that keep the packages apart, checked on the syntax tree: who imports whom, what nobody may use, how long things are."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
IMPORT_NAMES = {"libcolibri": "libcolibri", "rag": "colibri_rag", "cli": "colibri_cli", "converter": "colibri_converter"}  # folder -> name
CORE = {"numpy", "numba", "llvmlite", "safetensors", "sentencepiece", "jinja2", "regex"}
MAY_IMPORT = {  # folder -> our packages and other people's
    "libcolibri": CORE,
    "converter": CORE | {"libcolibri"},
    "rag": {
        "libcolibri", "numpy", "faiss", "sqlite_utils", "charset_normalizer", "markdown_it", "bs4",
        "pypdfium2", "openpyxl", "docx", "pptx",
    },
    "cli": {"libcolibri", "colibri_rag", "colibri_converter", "rich", "prompt_toolkit", "click", "numpy"},
}  # fmt: skip
NETWORK = {
    "socket", "socketserver", "ssl", "http", "urllib.request", "urllib.error", "urllib3", "ftplib", "smtplib", "poplib", "imaplib",
    "telnetlib", "nntplib", "xmlrpc", "requests", "httpx", "aiohttp", "websockets",
    "asyncio", "huggingface_hub", "hf_xet", "grpc", "paramiko",
}  # fmt: skip
UNSAFE = {"pickle", "marshal", "shelve", "dill"}
QUIET = ("libcolibri", "rag", "converter")  # libraries return facts, only the command line prints
MAX_FUNCTION_LINES = 80
MAX_FILE_LINES = 600
PACKAGE_NAMES = {  # import name -> name in pyproject.toml, where they differ
    "faiss": "faiss-cpu", "sqlite_utils": "sqlite-utils", "charset_normalizer": "charset-normalizer", "prompt_toolkit": "prompt_toolkit",
    "markdown_it": "markdown-it-py", "bs4": "beautifulsoup4", "docx": "python-docx", "pptx": "python-pptx",
}  # fmt: skip


def files_of(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def imports_of(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Absolute imports as dotted names; relative ones stay within their package and are left out."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node, node.module
            yield from ((node, f"{node.module}.{alias.name}") for alias in node.names)


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in nodes_of(path) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def is_kernel(path: Path) -> bool:
    """Kernels are straight-line arithmetic, written out on purpose; their length is no sign of a missing idea."""
    return bool({"kernels", "simd"} & set(path.parts))


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_imports_point_down(folder):
    wrong = [
        f"{where(path, node)} imports {name}"
        for path in files_of(folder)
        for node, name in imports_of(path)
        if name.split(".")[0] not in MAY_IMPORT[folder] | {IMPORT_NAMES[folder]} | set(sys.stdlib_module_names)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", IMPORT_NAMES)
def test_a_package_imports_itself_relatively_only(folder):
    own = IMPORT_NAMES[folder]
    imports = [(path, node, name) for path in files_of(folder) for node, name in imports_of(path)]
    wrong = [f"{where(path, node)} imports {name}" for path, node, name in imports if name.split(".")[0] == own]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", IMPORT_NAMES)
def test_relative_imports_stay_within_the_package(folder):
    wrong = []
    for path in files_of(folder):
        depth = len(path.relative_to(ROOT).parts) - 1
        nodes = [node for node in nodes_of(path) if isinstance(node, ast.ImportFrom) and node.level > depth]
        wrong += [where(path, node) for node in nodes]
    assert not wrong, "\n".join(wrong)


def everything_shipped() -> list[Path]:
    return [*files_of(*IMPORT_NAMES), ROOT / "bootstrap.py", *files_of("benchmarks")]


def test_nothing_imports_a_network_library():
    wrong = [
        f"{where(path, node)} imports {name}"
        for path in everything_shipped()
        for node, name in imports_of(path)
        if name in NETWORK or name.split(".")[0] in NETWORK
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_can_load_code_from_data():
    """No pickle anywhere; numpy arrays are read with allow_pickle left at its safe default."""
    wrong = [f"{where(path, node)} imports {name}" for path in everything_shipped() for node, name in imports_of(path) if name in UNSAFE]
    for path in everything_shipped():
        calls = [node for node in nodes_of(path) if isinstance(node, ast.Call)]
        wrong += [f"{where(path, node)} allows pickle" for node in calls if any(keyword.arg == "allow_pickle" for keyword in node.keywords)]
        names = {"eval", "exec"}
        wrong += [f"{where(path, node)} evaluates text" for node in calls if isinstance(node.func, ast.Name) and node.func.id in names]
    assert not wrong, "\n".join(wrong)


def test_libraries_do_not_print():
    wrong = [
        where(path, node)
        for path in files_of(*QUIET)
        for node in nodes_of(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong, "\n".join(wrong)


def test_libraries_do_not_exit():
    wrong = [
        where(path, node)
        for path in files_of(*QUIET)
        for node in nodes_of(path)
        if (isinstance(node, ast.Name) and node.id in ("SystemExit", "exit", "quit"))
        or (isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.exit", "os._exit", "os.abort"))
    ]
    assert not wrong, "\n".join(wrong)


def test_the_core_reads_no_environment_variables():
    names = ("os.environ", "os.getenv", "os.environb", "os.putenv")
    wrong = [
        where(path, node)
        for path in files_of(*QUIET)
        for node in nodes_of(path)
        if (isinstance(node, ast.Attribute) and ast.unparse(node) in names)
        or (isinstance(node, ast.ImportFrom) and node.module == "os" and {alias.name for alias in node.names} & {"environ", "getenv"})
    ]
    assert not wrong, "\n".join(wrong)


def test_no_exception_is_swallowed():
    """A handler that only passes hides what went wrong: say why in a narrower way, or return a value."""
    wrong = [
        where(path, node)
        for path in everything_shipped()
        for node in nodes_of(path)
        if isinstance(node, ast.ExceptHandler) and all(isinstance(child, ast.Pass) for child in node.body)
    ]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_unfinished():
    words = re.compile("|".join(["TO" + "DO", "FIX" + "ME", "XX" + "X", "for" + " now", "NotImpl" + "ementedError"]))
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in everything_shipped()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if words.search(line)
    ]
    assert not wrong, "\n".join(wrong)


def code_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    docstring = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
    without = (docstring.end_lineno or docstring.lineno) - docstring.lineno + 1 if docstring else 0
    return (node.end_lineno or node.lineno) - node.lineno + 1 - without


def test_functions_are_short():
    wrong = [
        f"{where(path, node)} {node.name} has {code_lines(node)} lines, at most {MAX_FUNCTION_LINES}"
        for path in everything_shipped()
        if not is_kernel(path)
        for node in functions_of(path)
        if code_lines(node) > MAX_FUNCTION_LINES
    ]
    assert not wrong, "\n".join(wrong)


def test_most_functions_are_very_short():
    lengths = sorted(code_lines(node) for path in everything_shipped() if not is_kernel(path) for node in functions_of(path))
    assert lengths[int(0.9 * len(lengths))] < 35


def test_files_are_short():
    counts = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in everything_shipped() if not is_kernel(path)}
    wrong = [f"{path.relative_to(ROOT)} has {count} lines" for path, count in counts.items() if count > MAX_FILE_LINES]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is():
    wrong = [str(path.relative_to(ROOT)) for path in everything_shipped() if tree_of(path).body and not ast.get_docstring(tree_of(path))]
    assert not wrong, "\n".join(wrong)


def declared(requirements: list[str]) -> set[str]:
    return {re.match(r"[A-Za-z0-9_-]+", requirement).group() for requirement in requirements}


def test_pyproject_declares_what_is_imported():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    core = declared(project["dependencies"])
    available = {
        "libcolibri": core,
        "converter": core,
        "rag": core.union(*(declared(extras.get(name, [])) for name in ("rag", "pdf", "office"))),
        "cli": core | declared(extras["cli"]),
    }
    wrong = []
    for folder, packages in available.items():
        third_party = {name.split(".")[0] for path in files_of(folder) for _, name in imports_of(path)}
        third_party -= set(sys.stdlib_module_names) | set(IMPORT_NAMES.values())
        wrong += [f"{folder} imports {name}" for name in third_party if PACKAGE_NAMES.get(name, name) not in packages]
    assert not wrong, f"not declared in pyproject.toml: {wrong}"


def test_pyproject_lists_every_package():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"])
    found = set()
    for folder, name in IMPORT_NAMES.items():
        for path in (ROOT / folder, *(ROOT / folder).rglob("*/")):
            if path.name != "__pycache__" and any(child.is_file() for child in path.iterdir()):
                found.add(".".join([name, *path.relative_to(ROOT / folder).parts]))
    assert found <= listed and {package for package in listed - found if not package.endswith(".prompts")} == set()
