"""`colibri experts`: what is drawn on screens of any kind, as a page, as JSON; histories that are there, missing, forgotten."""

import io
import json
import os
import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from colibri_cli.app import main
from colibri_cli.errors import FAILED, USAGE
from colibri_cli.expert_map import RAMP, ExpertMap, draw
from colibri_cli.expert_page import page
from colibri_cli.paths import Home
from colibri_cli.services import Services
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from libcolibri.expert_trace import TraceWriter
from libcolibri.expert_usage import ExpertUsage
from libcolibri.format import read_manifest
from libcolibri.usage_history import UsageHistory, history_file
from tests.tiny_model import make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32}
    return make_model(tmp_path_factory.mktemp("models") / "小模型", num_attention_heads=4, num_key_value_heads=2, **sizes)


def invoke(home: Path, arguments: Sequence[object]) -> Result:
    words = [str(argument) for argument in arguments]
    result = CliRunner().invoke(main, words, obj=Services(home=Home(home)), env={"COLUMNS": "80"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture
def home(tmp_path: Path, model: Path) -> Path:
    """A user's folder that knows ten tokens: experts 1 and 2 of both layers, and 5 once."""
    manifest = read_manifest(model)
    (tmp_path / "usage").mkdir()
    history = UsageHistory(history_file(tmp_path / "usage", manifest.fingerprint), manifest.fingerprint, {0: 6, 2: 6})
    history.note_pass({0: np.array([[1, 2]] * 9 + [[1, 5]]), 2: np.array([[2, 1]] * 10)})
    history.save()
    return tmp_path


def test_the_map_is_drawn(home: Path, model: Path) -> None:
    result = invoke(home, ["experts", model])
    assert result.exit_code == 0 and result.stderr == ""
    assert result.stdout.splitlines() == [
        "layer 0     2     4        quarter  entropy  unused",
        "    0    ######      :::      95 %     1.23       3",
        "    2    ######              100 %     1.00       4",
        "a cell is an expert; use against the layer's average: ' ' never  '.' 1/5 or less  '-' '+' average  '#' '@' 5 times or more",
        "小模型: 2 layers of 6 experts, 10 tokens recorded",
        "the hottest quarter of a layer's experts has 98 % of its uses; entropy 1.12 of 2.58 bits; 7 of 12 experts were never used",
    ]


def test_residents_and_pins_are_marked(home: Path, model: Path) -> None:
    lines = invoke(home, ["experts", model, "--expert-cache", "2", "--pin", "2:4"]).stdout.splitlines()
    assert (lines[2], lines[4]) == ("         x", "         x  x     P")
    assert lines[-2].endswith("begins with 4 of 12 experts (33 %), which had 75 % of the uses") and lines[-1] == "1 pinned"
    assert "x in memory, P pinned" in lines
    facts = json.loads(invoke(home, ["experts", model, "--expert-cache", "2", "--pin", "2:4", "--json"]).stdout)
    assert [layer["resident"] for layer in facts["layers"]] == [[1], [1, 2, 4]]
    assert [layer["pinned"] for layer in facts["layers"]] == [[], [4]]
    assert facts["resident"] == 4 and facts["resident_share"] == 0.75 and facts["unused"] == 7
    assert facts["layers"][0]["shares"] == [0, 0.5, 0.45, 0, 0, 0.05] and facts["model"] == str(model)


def test_a_recorded_run_is_drawn_with_and_without_a_model(tmp_path: Path, model: Path) -> None:
    size = read_manifest(model).experts[0].expert_bytes
    with TraceWriter(tmp_path / "轨迹", {0: size, 2: size}, {0: 6, 2: 6}) as writer:
        assert invoke(tmp_path, ["experts", "--trace", tmp_path / "轨迹"]).exit_code == FAILED  # nothing in it yet
        writer.add(7, [np.arange(6), np.arange(6)])
        writer.add(1, [np.array([3, 4]), np.array([0, 5])])
    alone = invoke(tmp_path, ["experts", "--trace", tmp_path / "轨迹", "--expert-cache", "1"])
    assert "2 passes recorded in 轨迹" in alone.stdout and "begins with 2 of 12" in alone.stdout
    facts = json.loads(invoke(tmp_path, ["experts", model, "--trace", tmp_path / "轨迹", "--json"]).stdout)
    assert facts["layers"][1]["shares"][:2] == [0.25, 0.125] and facts["trace"].endswith("轨迹")
    with TraceWriter(tmp_path / "other", {0: size}, {0: 6}) as writer:
        writer.add(1, [np.array([3, 4])])
    refused = invoke(tmp_path, ["experts", model, "--trace", tmp_path / "other"])
    assert refused.exit_code == FAILED and "was recorded with another model" in refused.stderr


def test_without_a_history_one_line_says_how_to_get_one(tmp_path: Path, model: Path) -> None:
    result = invoke(tmp_path, ["experts", model])
    assert result.exit_code == FAILED and result.stdout == "" and result.stderr.count("\n") == 1
    assert f"no use of its experts is recorded yet; run it once, as in `colibri run -m {model} -p Hello`" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_run_makes_one_and_forget_removes_it(tmp_path: Path, model: Path) -> None:
    declined = invoke(tmp_path, ["run", "-m", model, "-p", "1 2 3", "-n", "3", "--no-usage-history"])
    assert declined.exit_code == 0 and not (tmp_path / "usage").exists()
    first = invoke(tmp_path, ["run", "-m", model, "-p", "1 2 3", "-n", "3"])
    assert first.exit_code == 0 and "5 tokens recorded" in invoke(tmp_path, ["experts", model]).stdout
    second = invoke(tmp_path, ["run", "-m", model, "-p", "1 2 3", "-n", "3", "--preload", "--pin", "0:5"])
    assert second.stdout == first.stdout == declined.stdout
    assert "10 tokens recorded" in invoke(tmp_path, ["experts", model]).stdout
    assert invoke(tmp_path, ["experts", model, "--forget"]).stdout == f"{model}: its usage history is forgotten\n"
    assert os.listdir(tmp_path / "usage") == []
    assert invoke(tmp_path, ["experts", model, "--forget"]).stdout == f"{model}: has no usage history\n"


def test_a_damaged_history_is_named(home: Path, model: Path) -> None:
    next((home / "usage").iterdir()).write_bytes(b'{"format":"colibri-usage-1"')
    result = invoke(home, ["experts", model])
    assert result.exit_code == FAILED and "is damaged" in result.stderr
    assert invoke(home, ["experts", model, "--forget"]).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], USAGE, "no model: name one, or give a recorded run"),
        (["--forget"], USAGE, "no model"),
        (["MODEL", "--forget", "--json"], USAGE, "--forget draws nothing"),
        (["MODEL", "--expert-cache", "auto"], USAGE, "--expert-cache auto: expected"),
        (["MODEL", "--expert-cache", "1B"], FAILED, "cannot hold one token's 2 experts"),
        (["MODEL", "--pin", "1:0"], FAILED, "pinned layer 1"),
        (["MODEL", "--html", "."], FAILED, "Is a directory"),
        (["MODEL", "--html", "no/where.html"], FAILED, "error: no/where.html: No such file"),
    ],
)
def test_what_makes_no_sense(home: Path, model: Path, arguments: list[str], code: int, message: str) -> None:
    result = invoke(home, ["experts", *(model if word == "MODEL" else word for word in arguments)])
    assert result.exit_code == code and message in result.stderr and result.stderr.count("\n") == 1


def test_a_dense_model_has_no_map(tmp_path: Path) -> None:
    keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_only_layers", "shared_expert_intermediate_size")
    dense = make_model(tmp_path / "m", model_type="qwen2", **dict.fromkeys(keys))
    result = invoke(tmp_path, ["experts", dense])
    assert result.exit_code == FAILED and "has no experts: it is dense" in result.stderr


# --- the page


class Page(HTMLParser):
    """Titles, tags that were left open, and everything that a browser would load."""

    def __init__(self, text: str):
        super().__init__()
        self.titles: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.titles += [found["title"] or ""] if "title" in found else []
        self.loads += [name for name in found if name in ("src", "href", "srcset", "style", "onclick", "data")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe", "object") else []
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_stands_alone_and_replaces_the_file(home: Path, model: Path) -> None:
    target = home / "地图.html"
    target.write_text("older")
    result = invoke(home, ["experts", model, "--html", target, "--expert-cache", "2", "--pin", "0:0"])
    assert result.exit_code == 0 and result.stdout.splitlines()[-1] == f"written to {target}" and "2 layers of 6" in result.stdout
    text = target.read_text("utf-8")
    found = Page(text)
    assert found.open == [] and found.loads == [] and "url(" not in text and "//" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text and len(found.titles) == 12
    assert found.titles[:2] == ["layer 0, expert 0: 0.0 %, in memory, pinned", "layer 0, expert 1: 50.0 %, in memory"]
    assert found.titles[2] == "layer 0, expert 2: 45.0 %"
    assert sorted(path.name for path in home.iterdir()) == ["usage", "地图.html"]


def test_names_cannot_become_markup() -> None:
    usage = ExpertUsage({0: np.array([1.0, 2.0])}, 3.0)
    text = page(ExpertMap("<script>alert('x')</script>\x1b[2J", "3 & 4 <b>tokens</b>", usage))
    assert "<script" not in text and "<b>" not in text and "\x1b" not in text and "&lt;script&gt;" in text and "3 &amp; 4" in text


# --- screens


def drawn(shown: ExpertMap, width: int, colours: str | None = None, no_color: bool = False) -> list[str]:
    file = io.StringIO()
    options = {"force_terminal": colours is not None, "color_system": colours, "no_color": no_color}
    draw(Console(file=file, width=width, highlight=False, markup=False, emoji=False, **options), shown)
    return file.getvalue().splitlines()


counts = st.dictionaries(st.integers(0, 99), st.integers(1, 300), min_size=1, max_size=4)


@settings(max_examples=60, deadline=None)
@given(counts, st.integers(30, 200), st.integers(0, 2**31), st.booleans(), st.sampled_from([None, "truecolor", "256", "standard"]))
def test_rows_fit_any_screen(experts, width, seed, marked, colours):
    rng = np.random.default_rng(seed)
    usage = ExpertUsage({layer: rng.exponential(size=n) * (rng.random(n) < 0.8) for layer, n in sorted(experts.items())}, 9.0)
    first = frozenset(usage.hottest_first()[::2])
    marks = (frozenset(list(first)[:1]), 5, first) if marked else ()
    shown = ExpertMap("名", "x", usage, *marks)
    lines = drawn(shown, width, colours)
    rows = [line for line in lines if re.match(r"(?:\x1b\[[0-9;]*m)* +(\d+|layer) ", line)]
    assert len(rows) == len(experts) and len(drawn(shown, width)) >= len(rows) + 4
    for line in lines[: len(rows) + 1]:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        assert cell_len(plain) <= width and plain.isascii()


def test_colours_only_where_they_can_be_seen() -> None:
    usage = ExpertUsage({3: np.array([9.0, 1, 1, 1, 0])}, 12.0)
    shown = ExpertMap("m", "x", usage, frozenset([(3, 1)]), 100, frozenset([(3, 0), (3, 1)]))
    coloured = drawn(shown, 80, "truecolor")[1]
    cells = re.findall(r"\x1b\[(3[07]);(48;[0-9;]+)m(.  )\x1b\[0m", coloured)
    assert [(ink, mark) for ink, _, mark in cells] == [("30", "x  "), ("37", "P  "), *[("37", "   ")] * 3]
    assert len({colour for _, colour, _ in cells}) == 3 and cells[1][1] == cells[2][1]
    plain = drawn(shown, 80)
    for lines in (drawn(shown, 80, "standard"), drawn(shown, 80, "truecolor", no_color=True)):
        assert [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines] == plain
    assert plain[1].startswith(f"    3 {RAMP[8] * 3}{RAMP[3] * 9}   ") and plain[2] == "      x  P"


def test_heat_is_against_the_average_of_the_layer() -> None:
    usage = ExpertUsage({0: np.array([0.0, 1, 1, 1, 1, 1, 1, 1, 1, 92]), 1: np.ones(10)}, 100.0)
    shown = ExpertMap("m", "x", usage)
    assert shown.levels(0).tolist() == [0] + [1] * 8 + [9] and shown.levels(1).tolist() == [5] * 10
    assert shown.levels(0, 4).tolist() == [1, 1, 8] and shown.levels(1, 3).tolist() == [5] * 4
    marked = ExpertMap("m", "x", usage, frozenset([(0, 9)]), 1, frozenset([(0, 0), (0, 1), (0, 2), (0, 9)]))
    assert (marked.marks(0, 2), marked.marks(0, 4), marked.marks(1, 5)) == ("xo  P", "o P", "  ")
