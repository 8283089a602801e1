"""Full-text search in Chinese, identifiers, and queries that try to be syntax."""

import sqlite3

import pytest
from colibri_rag.text_index import TOKENIZER, index_text, match_expression, query_tokens
from hypothesis import given, settings
from hypothesis import strategies as st


def finds(text, query):
    connection = sqlite3.connect(":memory:")
    connection.execute(f'CREATE VIRTUAL TABLE t USING fts5(body, content=\'\', tokenize="{TOKENIZER}")')
    connection.execute("INSERT INTO t (rowid, body) VALUES (1, ?)", (index_text(text),))
    expression = match_expression(query_tokens(query))
    return bool(expression) and bool(connection.execute("SELECT rowid FROM t WHERE t MATCH ?", (expression,)).fetchall())


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("专家缓存保存最近使用的专家", "缓存"),
        ("黑猫喜欢散步", "猫"),
        ("猫", "猫"),
        ("他养了一只猫。", "猫"),
        ("東京都に住んでいます", "東京"),
        ("지식베이스에서 검색합니다", "지식베이스"),
        ("用expert_cache和--quant q4_k_m运行", "expert_cache"),
        ("用expert_cache和--quant q4_k_m运行", "--quant"),
        ("用expert_cache和--quant q4_k_m运行", "quant"),
        ("用expert_cache和--quant q4_k_m运行", "Q4_K_M"),
        ("用expert_cache和--quant q4_k_m运行", "cache"),
        ("用expert_cache和--quant q4_k_m运行", "运行"),
        ("class ExpertCache: pass", "cache"),
        ("class ExpertCache: pass", "expertcache"),
        ("written in C++ and C#", "C++"),
        ("libcolibri.encoder.Encoder", "Encoder"),
        ("Ｆｕｌｌ　ｗｉｄｔｈ", "full"),
        ("the café", "cafe"),
        ("many packages", "package"),
        ("Привет мир", "привет"),
        ("שלום עולם", "עולם"),
        ("مرحبا بالعالم", "مرحبا"),
        ("𠮷野家の牛丼", "𠮷野"),
    ],
)
def test_found(text, query):
    assert finds(text, query)


@pytest.mark.parametrize(("text", "query"), [("缓存", "内存"), ("黑猫", "狗"), ("cat", "category"), ("q4_k_m", "q6")])
def test_not_found(text, query):
    assert not finds(text, query)


@pytest.mark.parametrize(
    "query",
    ['"', '""" OR body:x', "NEAR(a b, 3)", "a AND", "body : x", "^x", "x*", "-x", "(((", "a' OR 1=1 --", "\0", "+ +", "NOT", "'; DROP t"],
)
def test_query_is_never_syntax(query):
    finds("any text", query)


def test_stop_words_are_dropped_only_when_something_is_left():
    assert query_tokens("How do I use the cache?") == ["use", "cach"]
    assert query_tokens("to be or not to be")
    assert query_tokens("什么") == ["什么"]
    assert "什么" not in query_tokens("什么是缓存")


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_indexed_and_any_query_is_valid(text):
    finds(text, text)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="缓存专家内猫東京の지식 ab_1-Q", min_size=1, max_size=30))
def test_a_text_finds_itself(text):
    if query_tokens(text):
        assert finds(text, text)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=100))
def test_tokens_hold_only_what_the_tokenizer_keeps_together(text):
    connection = sqlite3.connect(":memory:")
    connection.execute(f'CREATE VIRTUAL TABLE t USING fts5(body, content=\'\', tokenize="{TOKENIZER}")')
    connection.execute("INSERT INTO t (rowid, body) VALUES (1, ?)", (index_text(text),))
    connection.execute("CREATE VIRTUAL TABLE v USING fts5vocab(t, row)")
    assert {row[0] for row in connection.execute("SELECT term FROM v")} == set(index_text(text).split(" ")) - {""}
