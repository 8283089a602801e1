"""Rendering, refusals, the sandbox and its bounds."""

import json

import pytest

from libcolibri import template_sandbox
from libcolibri.chat_template import ChatTemplate, missing_template
from libcolibri.errors import TemplateError

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
USER = [{"role": "user", "content": "Hi <b> 你好"}]


def render(source: str, messages=USER, **extras) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>").render(messages, **extras)


def test_conversation():
    assert render(CHATML) == "<|im_start|>user\nHi <b> 你好<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi <b> 你好<|im_end|>\n"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ bos_token }}x{{ eos_token }}", "<s>x</s>"),
        ("{% if true %}\n  a\n  {% endif %}\nb", "  a\nb"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{{ messages[0].role }}{% endgeneration %}", "user"),
        ("{{ {'b': 'ä<', 'a': 1} | tojson }}", '{"b": "ä<", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ messages | map(attribute='role') | tojson }}", '["user"]'),
        ("{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }}{% endfor %}", "1/1True"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}", "a1"),
        ("{% for m in tools or [] %}x{% else %}none{% endfor %}", "none"),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "1"),
        ("{{ '-' * 3 }}{{ 2 ** 3 }}", "---8"),
        ("{{ strftime_now('%Y') | length }}", "4"),
        ("{{ mode }}", "fast"),
    ],
)
def test_features(source, expected):
    assert render(source, mode="fast") == expected


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('Roles must\nalternate') }}", "refuses this conversation: Roles must alternate"),
        ("{{ missing.name }}", "misses a value"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|misses"),
        ("{% set _ = messages.append(1) %}", "SecurityError|unsafe"),
        ("{{ 'x' * 100000000 }}", "makes a value of 100000000"),
        ("{{ 9 ** 9 ** 9 }}", "computes"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recurses too deeply"),
    ],
)
def test_refusals_are_one_line(source, message):
    with pytest.raises(TemplateError, match=message) as caught:
        render(source)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("source", ["{% if %}", "{{ 'a' ", "{% unknown %}", "{% for x in %}"])
def test_syntax_errors_name_the_line(source):
    with pytest.raises(TemplateError, match="line 1"):
        ChatTemplate(source)


def test_endless_templates_are_stopped(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_LOOP_STEPS", 5_000)
    nested = "{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateError, match="loop steps"):
        render(nested)
    with pytest.raises(TemplateError, match="loop steps"):
        render("{% macro f() %}" + nested + "{% endmacro %}{{ f() }}")
    monkeypatch.setattr(template_sandbox, "MAX_TRAFFIC", -100_000)
    with pytest.raises(TemplateError, match="characters"):
        render("{% for a in range(1000) %}{{ a }}{% endfor %}")


def test_slow_templates_are_stopped(monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_S", -1.0)
    with pytest.raises(TemplateError, match="longer than"):
        render(CHATML)


@pytest.mark.parametrize("messages", [["hi"], [{"content": "x"}], [{"role": 3}]])
def test_malformed_messages(messages):
    with pytest.raises(TemplateError, match="expected a mapping"):
        render(CHATML, messages)


def test_tools_choose_their_own_template():
    template = ChatTemplate({"default": "plain", "tool_use": "{{ tools[0].name }}"})
    assert template.render(USER) == "plain"
    assert template.render(USER, tools=[{"name": "search"}]) == "search"
    with pytest.raises(TemplateError, match="default"):
        ChatTemplate({"rag": "x"})


def test_load(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    config = {"chat_template": [{"name": "default", "template": "{{ bos_token }}A"}], "bos_token": {"content": "<s>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(USER) == "<s>A"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ eos_token }}", encoding="utf-8")
    (tmp_path / "colibri.json").write_text(json.dumps({"tokenizer": {"bos_token": "<b>", "eos_token": "<e>"}}))
    assert ChatTemplate.load(tmp_path).render(USER) == "<s><e>"
    config["chat_template"].append({"name": "tool_use", "template": "T"})
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert ChatTemplate.load(tmp_path).render(USER) == "<s><e>"  # the file is the default, the variants stay
    assert ChatTemplate.load(tmp_path).render(USER, tools=[{}]) == "T"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TemplateError, match="UTF-8"):
        ChatTemplate.load(tmp_path)


def test_missing_template_says_what_to_do():
    assert "chat_template.jinja" in str(missing_template("base-model"))


DOUBLINGS = 60
HOSTILE = {
    "concatenation": "{% set x = 'ab' %}" + "{% set x = x ~ x %}" * DOUBLINGS + "{{ x | length }}",
    "addition": "{% set x = 'ab' %}" + "{% set x = x + x %}" * DOUBLINGS,
    "set blocks": "{% set x = 'ab' %}" + "{% set x %}{{ x }}{{ x }}{% endset %}" * DOUBLINGS,
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(200) }}",
    "macros that never write": "{% macro m(n) %}{% if n %}{% set _ = m(n - 1) %}{% set _ = m(n - 1) %}{% endif %}{% endmacro %}{{ m(60) }}",
    "nested lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * DOUBLINGS + "{{ x }}",
    "nested dictionaries": "{% set x = {} %}" + "{% set x = {1: x, 2: x} %}" * DOUBLINGS + "{{ x | tojson }}",
    "compared lists": "{% set x = [1] %}" + "{% set x = [x, x] %}" * DOUBLINGS + "{{ x == [x, x][0] }}",
    "list sums": "{% set x = [1] %}" + "{% set x = x + x %}" * DOUBLINGS,
    "repetition": "{% set x = 'ab' * 400000 %}{% set x = x * 400000 %}",
    "replace": "{% set x = 'a' * 9999 %}{{ x | replace('a', x) | replace('a', x) }}",
    "replace method": "{% set x = 'a' * 9999 %}{{ x.replace('a', x) }}",
    "join": "{% set x = 'a' * 99999 %}{{ range(99999) | join(x) }}",
    "join method": "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "center": "{{ 'a' | center(10 ** 12) }}",
    "constant center": "{{ 'a' | center(1000000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000000) }}",
    "indent": "{{ 'a\\nb' | indent(1000000000000) }}",
    "tojson": "{{ [1] | tojson(indent=1000000000000) }}",
    "tabs": "{{ '\\t'.expandtabs(1000000000000) }}",
    "percent": "{{ '%1000000000000d' % 1 }}",
    "format filter": "{{ '%1000000000000d' | format(1) }}",
    "format": "{{ '{:1000000000000}'.format(1) }}",
    "format by argument": "{{ '{:{}}'.format(1, 1000000000000) }}",
    "batch": "{{ [1] | batch(1000000000000, 'x') | list }}",
    "slice": "{{ [1] | slice(1000000000000) | list }}",
    "squaring": "{% set x = 99999 %}" + "{% set x = x * x %}" * DOUBLINGS,
    "recursive loop": "{% for i in range(9999) recursive %}{{ loop(range(9999)) if loop.depth < 9 }}{% endfor %}",
    "raw text": "{% for i in range(99999) %}{% for j in range(99999) %}" + "a" * 999 + "{% endfor %}{% endfor %}",
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "endless text": "{{ lipsum(n=1000000) }}",
    "large source": "x" * 1_000_001,
}


@pytest.mark.parametrize("source", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_templates_are_refused_in_time_and_memory(source, monkeypatch):
    monkeypatch.setattr(template_sandbox, "MAX_RENDER_S", 1.0)
    monkeypatch.setattr(template_sandbox, "MAX_TRAFFIC", 30_000_000)
    with pytest.raises(TemplateError):
        render(source)


def test_a_large_conversation_is_not_hostile():
    messages = [{"role": "user", "content": "x" * 2_000}] * 1_000
    accumulating = "{% set ns = namespace(s='') %}{% for m in messages %}{% set ns.s = ns.s + m.content %}{% endfor %}{{ ns.s }}"
    assert len(render(accumulating, messages)) == 2_000_000


def test_system_message_goes_into_the_question_where_the_template_knows_none():
    refusal = "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    source = "{% for m in messages %}" + refusal + "{{ m.content }};{% endfor %}"
    assert render(source, [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]) == "S\n\nU;"
    with pytest.raises(TemplateError, match="System role not supported"):
        render(source, [{"role": "system", "content": "S"}])


def test_refusals_say_what_is_missing():
    with pytest.raises(TemplateError, match="works with tools only"):
        render("{% for tool in tools %}{{ tool }}{% endfor %}")
    with pytest.raises(TemplateError, match="given as an option of the template: 'functions'"):
        render("{{ functions.x }}")
