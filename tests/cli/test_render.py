"""An answer on the screen: wrapped right, nothing twice, nothing a terminal would obey."""

import io
import random

import pytest
from colibri_cli.repl.answering import excerpt
from colibri_cli.repl.render import AnswerWriter
from rich.cells import cell_len
from rich.console import Console

MARKDOWN = """# Title of the answer

A paragraph with **bold words** and `code here`, citing [1] and [1, 2] and a bad [9?]. It goes on for a while, so that it wraps.

- first item that is long enough to wrap around on a narrow screen
- second
  - nested item, also long enough to wrap on a narrow screen
10. numbered

> a quotation

```python
def f(x):
    return  x   # kept   as it is
```
缓存在内存里，专家从磁盘读取；如果缓存满了，最久没有使用的专家会被移出缓存【1】。（括号）“引号”《书名》混合English和中文的句子。
"""


def write(text: str, width: int, pieces: int | None = None, cites: bool = True) -> str:
    out = io.StringIO()
    writer = AnswerWriter(Console(file=out, force_terminal=True, color_system=None, width=width, markup=False, emoji=False), cites)
    rng = random.Random(pieces)
    while text:
        cut = len(text) if pieces is None else rng.randint(1, 5)
        writer.push(text[:cut])
        text = text[cut:]
    writer.close()
    return out.getvalue()


@pytest.mark.parametrize("width", [20, 40, 80, 200])
def test_the_screen_does_not_depend_on_how_the_text_is_cut(width: int) -> None:
    whole = write(MARKDOWN, width)
    assert all(write(MARKDOWN, width, seed) == whole for seed in range(8))


@pytest.mark.parametrize("width", [20, 40, 80])
def test_no_row_is_wider_than_the_screen_and_no_word_is_lost_or_doubled(width: int) -> None:
    screen = write(MARKDOWN.replace("```python", "").replace("```", ""), width)
    assert max(cell_len(row) for row in screen.splitlines()) <= width

    def bare(text: str) -> str:
        return "".join(character for character in text if not character.isspace() and character not in "#*`-•")

    assert bare(screen) == bare(MARKDOWN.replace("python", ""))


def test_lists_hang_and_code_is_exact() -> None:
    screen = write(MARKDOWN, 40)
    assert "• first item that is long enough to\n  wrap around" in screen
    assert "  • nested item, also long enough to\n    wrap on" in screen
    assert "    return  x   # kept   as it is\n" in screen
    assert "Title of the answer\n" in screen and "# Title" not in screen


def test_closing_punctuation_does_not_begin_a_row() -> None:
    for width in range(12, 40):
        assert not any(row.lstrip().startswith(("，", "；", "。", "）", "》", "】")) for row in write(MARKDOWN, width).splitlines())
        assert not any(row.endswith(("（", "《", "【", "“")) for row in write(MARKDOWN, width).splitlines())


def test_a_table_is_shown_whole_and_a_lone_bar_as_it_is() -> None:
    screen = write("| name | size |\n|---|---|\n| a | **1** |\n| b | 2 |\n\nafter\n| not a table\n", 40)
    assert "name" in screen and "┃" in screen and "**" not in screen
    assert screen.endswith("after\n| not a table\n")


def test_a_word_longer_than_the_screen_is_broken() -> None:
    screen = write("see " + "x" * 10_000 + " end", 40)
    assert max(map(len, screen.splitlines())) <= 40
    assert screen.count("x") == 10_000 and screen.endswith("end\n")


def test_citations_are_coloured_by_whether_they_exist() -> None:
    out = io.StringIO()
    writer = AnswerWriter(Console(file=out, force_terminal=True, color_system="standard", width=80))
    writer.push("yes [1] no [7?]")
    writer.close()
    assert "\x1b[1;36m[1]\x1b[0m" in out.getvalue() and "\x1b[1;31m[7?]\x1b[0m" in out.getvalue()


def test_an_empty_answer_leaves_no_line() -> None:
    assert write("", 80) == ""


def test_a_screen_of_one_column_does_not_hang() -> None:
    assert "abc" in write("abcdefghijkl 中文", 1).replace("\n", "")


def test_an_excerpt_leaves_out_the_heading_shown_beside_it() -> None:
    assert excerpt("# Title\n\nFirst words.\n") == "First words." and excerpt("# Title only") == "# Title only"
    assert len(excerpt("x" * 10_000)) == 160
