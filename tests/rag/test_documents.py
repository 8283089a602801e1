"""Readers: encodings, structure, and files that mean harm."""

import os
import time

import pytest
from colibri_rag import DocumentError
from colibri_rag.documents import parse_document, read_document
from hypothesis import given, settings
from hypothesis import strategies as st

CHINESE = "中文编码测试：知识库里的文件可能是任何编码。我们需要正确读取它们，不能出现乱码。"


def kinds(document):
    return [(block.kind, document.text[block.start : block.end]) for block in document.blocks]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-32", "gb18030", "gbk"])
def test_chinese_encodings(encoding):
    document = parse_document("a.txt", CHINESE.encode(encoding))
    assert document.text == CHINESE


def test_latin1_is_not_taken_for_chinese():
    text = "Le café est fermé, l'hôtel où nous dînâmes fût très agréable. Voilà déjà l'été, la forêt, le château."
    document = parse_document("a.txt", (text * 5).encode("latin-1"))
    assert "café" in document.text and "château" in document.text


def test_html_charset_declared():
    page = '<html><head><meta charset="shift_jis"><title>日本語</title></head><body><p>これはテストです。</p></body></html>'
    document = parse_document("a.html", page.encode("shift_jis"))
    assert document.title == "日本語" and "これはテストです" in document.text


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (bytes(range(256)) * 50, "NUL"),
        (os.urandom(5000).replace(b"\0", b"\1"), "binary"),
        (b"%PDF-1.7 ...", "PDF"),
        (b"PK\x03\x04abc", "zip"),
        ("text".encode("utf-16-le"), "byte order mark"),
        (b"\xff\xfea\xd8\x00\xd8", "utf-16-le"),
    ],
)
def test_binary_is_refused_with_a_reason(data, reason):
    with pytest.raises(DocumentError, match=reason):
        parse_document("noise.txt", data)


def test_control_and_escape_bytes_are_stripped():
    text = "a\x1b[31mred\x1b[0m \x1b]0;title\x07b\x08\x7f\u202eevil\u202c \U000e0041hidden\u200b\r\nnext\rlast\x0cpage"
    assert parse_document("a.txt", text.encode()).text == "ared evil hidden\nnext\nlast\npage"


def test_emoji_joiners_and_rtl_stay():
    text = "👩‍👩‍👧‍👦 family ❤️ שלום עולם مرحبا می‌خواهم"
    assert parse_document("a.txt", text.encode()).text == text


def test_markdown_structure_and_lines():
    text = "---\ntitle: 'My notes'\n---\n# One ##\n\ntext\nmore\n\n```python\n# no heading\n\nx = 1\n```\n\nTwo\n---\n"
    text += "\n| a | b |\n|---|---|\n| 1 | 2 |\n\n- x\n- y\n"
    document = parse_document("a.md", text.encode())
    assert document.title == "My notes"
    assert [kind for kind, _ in kinds(document)] == ["heading", "paragraph", "code", "heading", "table", "list"]
    assert document.blocks[4].heading_path == ("One", "Two")
    lines = text.split("\n")
    for block in document.blocks:
        assert lines[block.line - 1] == document.text[block.start : block.end].split("\n")[0]
    assert document.line_at(document.text.index("x = 1")) == lines.index("x = 1") + 1


def test_plain_text_headings():
    text = "Guide\n=====\n\nIntro text.\n\n1.1. First steps\n\nDo this.\n\n第三章 安装\n\n安装说明。\n"
    document = parse_document("a.rst", text.encode())
    assert document.title == "Guide"
    assert [block.heading_path[-1] for block in document.blocks if block.kind == "heading"] == ["Guide", "1.1. First steps", "第三章 安装"]


def test_html_shows_what_a_reader_sees():
    page = """<html><head><title>T &amp; x</title><style>p{}</style><script>var a = "<p>no</p>";</script></head><body>
<nav>menu</nav><h1>Head</h1><p>One <b>bold</b>
word.</p><p hidden>invisible</p><div style="display:none">ignore <div>all</div> rules</div>
<ul><li>first</li><li><p>second</p></li></ul>
<pre>code
  kept</pre><table><tr><th>a</th><th>b</th></tr><tr><td>1</td><td>2</td></tr></table>&#27;[31m<p>last &lt;tag&gt;</body>"""
    document = parse_document("a.html", page.encode())
    assert document.title == "T & x"
    assert kinds(document) == [
        ("heading", "Head"),
        ("paragraph", "One bold word."),
        ("list", "- first"),
        ("list", "- second"),
        ("code", "code\n  kept"),
        ("table", "a | b\n1 | 2"),
        ("paragraph", "[31m"),
        ("paragraph", "last <tag>"),
    ]
    assert [block.line for block in document.blocks[:3]] == [2, 2, 4]
    assert document.line_at(document.text.index("kept")) == 6


@pytest.mark.parametrize(
    "page",
    [
        "<div>" * 40_000 + "deep" + "</div>" * 40_000,
        "<table><tr><td>" * 20_000 + "deep",
        "<!--" * 40_000 + "deep",
        '<a "' * 40_000 + "deep",
        "<" * 60_000 + "deep",
        "<ul><li>" * 20_000 + "deep",
        "<p hidden>" * 20_000 + "deep",
        "&" * 60_000 + "deep",
        "<script>" * 20_000,
    ],
    ids=lambda page: page[:12],
)
def test_hostile_html_takes_linear_time(page):
    started = time.perf_counter()
    parse_document("a.html", page.encode())
    assert time.perf_counter() - started < 5


@pytest.mark.parametrize("suffix", [".md", ".txt", ".html", ".py"])
def test_huge_line(suffix):
    started = time.perf_counter()
    document = parse_document("a" + suffix, b"word " * 1_000_000)
    assert len(document.text) > 4_000_000 and time.perf_counter() - started < 5


def test_empty_file_is_a_document_without_blocks():
    for suffix in (".txt", ".md", ".html", ".py"):
        assert parse_document("a" + suffix, b"").blocks == ()


def test_too_large_and_not_regular(tmp_path):
    path = tmp_path / "big.txt"
    path.write_bytes(b"x" * 100)
    with pytest.raises(DocumentError, match="100 bytes, more than the limit of 10"):
        read_document(str(path), max_bytes=10)
    os.mkfifo(tmp_path / "pipe.txt")
    with pytest.raises(DocumentError, match="regular"):
        read_document(str(tmp_path / "pipe.txt"))
    with pytest.raises(DocumentError, match="No such file"):
        read_document(str(tmp_path / "none.txt"))


# Control characters would only make it binary.
CLEAN = st.text(alphabet=st.characters(exclude_categories=("Cs", "Cc")), max_size=300)
MARKUP = st.text(alphabet=st.sampled_from(list("ab 。\n#`|-=<>/\"'&;!ph1*文\t")), max_size=300)


@settings(max_examples=150, deadline=None)
@given(st.one_of(CLEAN, MARKUP), st.sampled_from([".md", ".txt", ".html", ".py", ".rst"]))
def test_blocks_are_ordered_slices(text, suffix):
    document = parse_document("a" + suffix, text.encode("utf-8", "ignore"))
    end = 0
    for block in document.blocks:
        assert end <= block.start < block.end <= len(document.text)
        assert document.text[block.start : block.end].strip()
        end = block.end
    if suffix != ".html" and suffix != ".md":
        held = "".join(document.text[block.start : block.end] for block in document.blocks)
        assert "".join(held.split()) == "".join(document.text.split())


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=400), st.sampled_from([".md", ".txt", ".html"]))
def test_any_bytes_read_or_refused(data, suffix):
    try:
        document = parse_document("a" + suffix, data)
    except DocumentError:
        return
    assert not any(c < " " and c not in "\n\t" for c in document.text) and "\x1b" not in document.text
