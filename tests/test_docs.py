"""What the documents say is what the programs do: commands, options, exit codes, names, links, numbers."""

import ast
import importlib
import importlib.util
import inspect
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "data" / "docs"
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
REFERENCES = [DOCS / "en" / "command-line.md", DOCS / "zh" / "命令行参考.md"]
CHAT_PAGES = [DOCS / "en" / "chat-commands.md", DOCS / "zh" / "对话命令.md"]


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def scripts() -> dict[str, click.Command]:
    """Program name -> its click command, from pyproject.toml."""
    entries = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["scripts"]
    loaded = {}
    for name, entry in entries.items():
        module, attribute = entry.split(":")
        loaded[name] = getattr(importlib.import_module(module), attribute)
    return loaded


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command that can be run, with its full name."""
    for name, command in scripts().items():
        if isinstance(command, click.Group):
            context = click.Context(command)
            for child in command.list_commands(context):
                found = command.get_command(context, child)
                assert found is not None
                yield f"{name} {child}", found
        yield name, command


def options_of(command: click.Command) -> set[str]:
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    return {text for option in options for text in (*option.opts, *option.secondary_opts)} | {"--help", "-h"}


def load_bootstrap():
    spec = importlib.util.spec_from_file_location("bootstrap_in_docs", ROOT / "bootstrap.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bootstrap_options() -> dict[str, set[str]]:
    """bootstrap.py's commands and their options."""
    subparsers = next(action for action in load_bootstrap().parser()._actions if hasattr(action, "choices") and action.choices)
    return {name: {text for action in one._actions for text in action.option_strings} for name, one in subparsers.choices.items()}


def shell_lines(page: Path) -> Iterator[str]:
    """Lines of code blocks that run one of our programs."""
    fenced = re.findall(r"```sh\n(.*?)```", text_of(page), re.DOTALL)
    lines = [line for block in fenced for line in block.splitlines()] + re.findall(r"^ {4,}(.*)$", text_of(page), re.MULTILINE)
    for line in lines:
        line = re.sub(r"^\.venv/bin/", "", line.strip())
        if re.match(r"(colibri(-\w+)?|python3(\.\d+)? bootstrap\.py|py -3\.\d+ bootstrap\.py)(\s|$)", line):
            yield line


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_in_the_documents_exist(page):
    known = {name: options_of(command) for name, command in commands()}
    bootstrap = bootstrap_options()
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        if "bootstrap.py" in words:
            at = words.index("bootstrap.py")
            name, options, rest = words[at + 1], bootstrap[words[at + 1]], words[at + 2 :]
        else:
            name = " ".join(words[:2]) if words[0] == "colibri" and not words[1].startswith("-") else words[0]
            options, rest = known[name], words[1:]
        rest = rest[: rest.index("--")] if "--" in rest else rest
        used = {word.split("=")[0] for word in rest if re.match(r"--?[a-zA-Z]", word)}
        assert used <= options | {"--version"}, f"{line}: {name} has no {used - options}"


@pytest.mark.parametrize("page", REFERENCES, ids=name_of)
def test_every_command_and_option_is_documented(page):
    text = text_of(page)
    for name, command in commands():
        assert name in text, f"{name} is not in {page.name}"
        missing = {option for option in options_of(command) if option.startswith("--") and not re.search(rf"{option}(?![\w-])", text)}
        assert not missing, f"{page.name} lacks {missing} of {name}"
    for name, options in bootstrap_options().items():
        missing = {option for option in options - {"--help"} if option.startswith("--") and option not in text}
        assert f"`{name}" in text and not missing, f"{page.name} lacks {missing} of bootstrap.py {name}"


@pytest.mark.parametrize("page", REFERENCES, ids=name_of)
def test_the_reference_names_no_option_that_does_not_exist(page):
    known = set().union(*(options_of(command) for _, command in commands()), *bootstrap_options().values(), {"--version"})
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text_of(page)))
    assert named <= known, named - known


@pytest.mark.parametrize("page", REFERENCES, ids=name_of)
def test_exit_codes_are_documented(page):
    codes = importlib.import_module("colibri_cli.errors").EXIT_CODES
    section = re.split(r"## (?:Exit codes|退出码)", text_of(page))[1]
    assert {int(number) for number in re.findall(r"\b\d+\b", section)} == set(codes)


def documented_defaults(page: Path) -> dict[str, list[str]]:
    """Option -> the last cells of the table rows that begin with it."""
    found: dict[str, list[str]] = {}
    for row in re.findall(r"^\| (`-.*) \|$", text_of(page), re.MULTILINE):
        first, *_, last = row.split(" | ")
        for option in re.findall(r"--[a-z-]+", first):
            found.setdefault(option, []).append(last)
    return found


def default_of(option: click.Option) -> str | None:
    """What --help says that an option defaults to; None where it says nothing."""
    stated = re.search(r"\[default: (.*)\]$", option.help or "")
    if stated:
        return stated[1]
    return str(option.default) if option.show_default is True else None


@pytest.mark.parametrize("page", REFERENCES, ids=name_of)
def test_defaults_are_those_of_help(page):
    """Numbers and names in both languages, sentences in English."""
    cells = documented_defaults(page)
    for name, command in commands():
        for option in command.params:
            expected = default_of(option) if isinstance(option, click.Option) else None
            english = expected is not None and not re.fullmatch(r"[a-z]+|[\d.]+", expected)
            if expected is None or (english and page != REFERENCES[0]) or "--quant" in option.opts:
                continue
            said = cells.get(max(option.opts, key=len), [])
            if said or name != "colibri trace":  # whose one number is in a sentence
                assert any(expected in cell for cell in said), f"{name} {option.opts}: --help says {expected!r}, the page {said}"


@pytest.mark.parametrize("page", CHAT_PAGES, ids=name_of)
def test_slash_commands_are_documented(page):
    table = {command.name for command in importlib.import_module("colibri_cli.repl.commands").COMMANDS}
    assert set(re.findall(r"^[|-] `/(\w+)", text_of(page), re.MULTILINE)) == table


# ---- Python in the documents


def python_blocks() -> list[tuple[str, str]]:
    pages = [*READMES, DOCS / "en" / "embedding-in-python.md", DOCS / "zh" / "在程序中使用.md"]
    blocks = []
    for page in pages:
        fenced = re.findall(r"```python\n(.*?)```", text_of(page), re.DOTALL)
        indented = [inspect.cleandoc("\n" + block) for block in re.findall(r"((?:^ {4}.*\n|^\n)+)", text_of(page), re.MULTILINE)]
        code = [block for block in indented if re.match(r"\s*(from|import) ", block)]
        blocks += [(f"{name_of(page)} {number}", block) for number, block in enumerate(fenced + code, start=1)]
    return blocks


def imported_names(tree: ast.Module) -> dict[str, object]:
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                names[alias.name] = getattr(importlib.import_module(node.module), alias.name)
    return names


def called(node: ast.Call, names: dict[str, object]) -> object | None:
    """The function behind `Name(...)` or `Name.method(...)`, if the name was imported."""
    if isinstance(node.func, ast.Name):
        return names.get(node.func.id)
    if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) and node.func.value.id in names:
        return getattr(names[node.func.value.id], node.func.attr)
    return None


@pytest.mark.parametrize(("where", "code"), python_blocks(), ids=lambda value: value if len(value) < 60 else "")
def test_python_in_the_documents_fits_the_library(where, code):
    """It parses, its imports exist, and its calls bind to the signatures of what they call."""
    tree = ast.parse(code)
    names = imported_names(tree)
    for node in ast.walk(tree):
        function = called(node, names) if isinstance(node, ast.Call) else None
        if function is not None:
            arguments = [None] * len(node.args)
            keywords = {keyword.arg: None for keyword in node.keywords if keyword.arg}
            inspect.signature(function).bind(*arguments, **keywords)


def test_what_is_said_about_sessions_is_so():
    engine = importlib.import_module("libcolibri.engine").Engine
    session = importlib.import_module("libcolibri.session").Session
    options = {"threads", "context_length", "expert_cache", "prefetch", "preload", "on_progress"}
    assert options <= set(inspect.signature(engine.open).parameters)
    assert {"max_tokens", "stop", "cancel"} <= set(inspect.signature(session.generate).parameters)


def test_every_error_is_documented():
    errors = importlib.import_module("libcolibri.errors")
    names = {name for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, errors.ColibriError)}
    text = text_of(DOCS / "en" / "embedding-in-python.md")
    assert not {name for name in names if name not in text}


# ---- facts


@pytest.mark.parametrize("page", READMES, ids=name_of)
def test_the_status_table_is_true(page):
    types = set(importlib.import_module("libcolibri.quant").FORMATS)
    recipes = set(importlib.import_module("colibri_converter.plan").RECIPES)
    rows = [line for line in text_of(page).splitlines() if line.startswith("|")]
    family_row, type_row = rows[2], rows[3]
    assert str(len(importlib.import_module("libcolibri.models.registry").FAMILIES)) in family_row
    named_types, named_recipes = (set(re.findall(r"[a-z]+\d+(?:_[a-z0-9]+)*", part)) for part in re.split(r"recipes|方案", type_row))
    assert named_types == types and named_recipes == recipes


@pytest.mark.parametrize("page", [DOCS / "en" / "quantization.md", DOCS / "zh" / "模型转换与量化.md"], ids=name_of)
def test_the_table_of_tensor_types_is_true(page):
    formats = importlib.import_module("libcolibri.quant").FORMATS
    named = {}
    for kinds, _, bits, _ in re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([\d., 、]+) \| ([^|]+) \|$", text_of(page), re.MULTILINE):
        names, numbers = re.findall(r"\w+", kinds), [float(number) for number in re.findall(r"[\d.]+", bits)]
        named |= dict(zip(names, numbers if len(numbers) > 1 else numbers * len(names), strict=True))
    assert named.keys() == formats.keys()
    assert {kind for kind in named if abs(named[kind] - formats[kind].bits_per_weight) > 0.01} == set()


@pytest.mark.parametrize("page", [DOCS / "en" / "model-families.md", DOCS / "zh" / "模型家族.md"], ids=name_of)
def test_the_page_of_families_is_true(page):
    registry = importlib.import_module("libcolibri.models.registry")
    parts = re.split("## Not yet|## 尚不支持", text_of(page).split("## GGUF")[0])
    known, refused = (set(re.findall(r"`([a-z0-9_]+)`", part)) for part in parts)
    assert known - {"config", "model_type", "index_topk", "bert"} == set(registry.FAMILIES)
    assert refused == set(registry.MISSING)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", text_of(page)):
        assert "://" not in target, f"{target}: the documents are read without a network"
        assert (page.parent / target).exists(), target


def test_the_changelog_knows_this_version():
    version = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]["version"]
    assert re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", text_of(ROOT / "CHANGELOG.md"), re.MULTILINE)


def test_the_documents_are_of_use_in_both_languages():
    english = " ".join(text_of(page) for page in (DOCS / "en").glob("*.md"))
    chinese = "".join(text_of(page) for page in (DOCS / "zh").glob("*.md"))
    assert len(english.split()) > 6000 and len(re.findall(r"[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]", chinese)) > 8000


def test_the_benchmark_questions_can_be_judged():
    questions = json.loads(text_of(ROOT / "benchmarks" / "questions.json"))
    assert len(questions) == 10 and sum(question["language"] == "zh" for question in questions) == 5
    unanswerable = [question for question in questions if not question["answerable"]]
    assert sorted(question["language"] for question in unanswerable) == ["en", "zh"]
    for question in questions:
        assert bool(question["facts"]) == bool(question["sources"]) == question["answerable"]
        for source in question["sources"]:
            text = text_of(DOCS / source).lower().replace("\n", " ")
            for words in question["facts"]:
                assert any(word.lower() in text for word in words), f"{source} does not say any of {words}"
