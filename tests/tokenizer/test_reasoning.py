"""Reasoning, tool calls and answers told apart, whatever the model's markers and wherever its text is cut."""

import pytest

from libcolibri.chat_template import ChatTemplate
from libcolibri.errors import TemplateError
from libcolibri.reasoning import ReasoningSplitter, open_section, sections_of
from libcolibri.stop import StopStrings
from libcolibri.text_filter import StoppableText

HARMONY = "<|channel|>analysis <|channel|>commentary <|channel|>final"


def told_apart(template: str, text: str, prompt: str = "", chars: int = 1) -> dict[str, str]:
    sections = sections_of(template, tools=True)
    splitter = ReasoningSplitter(sections, open_section(sections, prompt))
    pieces = [piece for at in range(0, len(text), chars) for piece in splitter.push(text[at : at + chars])] + splitter.flush()
    return {channel: "".join(text for found, text in pieces if found == channel) for channel, _ in pieces}


CASES = {
    "think": ("<think>", "", "<think>\nWell.\n</think>\n\nFour.", {"reasoning": "Well.", "answer": "Four."}),
    "opened by the prompt": ("<think>", "Q<think>\n", "Well.</think>\nFour.", {"reasoning": "Well.", "answer": "Four."}),
    "closed by the prompt": ("<think>", "Q<think>\n\n</think>\n\n", "Four.", {"answer": "Four."}),
    "earlier turns": ("<think>", "<think>a</think>b<think>", "c</think>d", {"reasoning": "c", "answer": "d"}),
    "a stray end": ("<think>", "", "</think>Four.", {"answer": "Four."}),
    "never ended": ("<think>", "<think>", "Well", {"reasoning": "Well"}),
    "twice": ("<think>", "", "a <think>b</think> c <think>d</think> e", {"answer": "a c e", "reasoning": "bd"}),
    "no markers": ("", "", "a <think>b</think>", {"answer": "a <think>b</think>"}),
    "nearly markers": ("<think>", "", "a <thin <b> </thing> <", {"answer": "a <thin <b> </thing> <"}),
    "code": ("<think>", "", "if a < b:\n    c  \n", {"answer": "if a < b:\n    c  \n"}),
    "mistral": ("[THINK]", "", "[THINK]Well.[/THINK]Four.", {"reasoning": "Well.", "answer": "Four."}),
    "seed": ("<seed:think>", "", "<seed:think>Well.</seed:think>Four.", {"reasoning": "Well.", "answer": "Four."}),
    "command-r": (
        "<|START_THINKING|>", "", "<|START_THINKING|>Well.<|END_THINKING|>Four.", {"reasoning": "Well.", "answer": "Four."},
    ),
    "gemma": ("<|channel>", "", "<|channel>thought\nWell.\n<channel|>Four.", {"reasoning": "Well.", "answer": "Four."}),
    "granite": (
        "<think></think><response>", "", "<think>Well.</think><response>Four.</response>", {"reasoning": "Well.", "answer": "Four."},
    ),
    "apriel": (
        "Here are my reasoning steps:", "\nHere are my reasoning steps:\n", "Well.\n[BEGIN FINAL RESPONSE]\nFour.",
        {"reasoning": "Well.", "answer": "Four."},
    ),
    "kimi": (
        "<|open|>", "<|open|>think<|sep|>", "Well.<|close|>think<|sep|><|open|>response<|sep|>Four.<|close|>response<|sep|>",
        {"reasoning": "Well.", "answer": "Four."},
    ),
    "hunyuan": ("':opensource'", "<think:opensource>", "Well.</think:opensource>Four.", {"reasoning": "Well.", "answer": "Four."}),
    "solar": (
        "<|begin|>assistant", "", "<|think|>Well.<|end|><|begin|>assistant<|content|>Four.<|end|>",
        {"reasoning": "Well.", "answer": "Four."},
    ),
    "gpt-oss": (
        HARMONY, "", "<|channel|>analysis<|message|>2 < 4<|end|><|start|>assistant<|channel|>final<|message|>Four.<|return|>",
        {"reasoning": "2 < 4", "answer": "Four."},
    ),
    "gpt-oss, a call": (
        HARMONY, "",
        "<|channel|>analysis<|message|>a<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"b":1}<|call|>',
        {"reasoning": "a", "tool_call": 'functions.f {"b":1}\n'},
    ),
    "gpt-oss, a call with its name first": (
        HARMONY, "", '<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{"b":1}<|call|>',
        {"tool_call": 'functions.f {"b":1}\n'},
    ),
    "two calls": (
        "<think> <tool_call>", "", "Yes.\n<tool_call>\n{1}\n</tool_call>\n<tool_call>{2}</tool_call>",
        {"answer": "Yes.\n", "tool_call": "{1}\n{2}\n"},
    ),
    "calls to the end": ("[TOOL_CALLS]", "", '[TOOL_CALLS][{"name": "f"}]', {"tool_call": '[{"name": "f"}]'}),
}  # fmt: skip


@pytest.mark.parametrize("chars", [1, 3, 1000])
@pytest.mark.parametrize(("template", "prompt", "text", "expected"), CASES.values(), ids=CASES.keys())
def test_channels(template, prompt, text, expected, chars):
    assert told_apart(template, text, prompt, chars) == expected


def test_tool_calls_are_text_when_there_are_no_tools():
    assert ReasoningSplitter(sections_of("<tool_call>")).push("<tool_call>x") == [("answer", "<tool_call>x")]


class Spelled:
    """A stream whose token ids are indices of texts."""

    def __init__(self, texts):
        self.texts = texts

    def push(self, token_id):
        return self.texts[token_id]

    def flush(self):
        return ""


def test_stop_strings_are_looked_for_in_the_answer_only():
    sections = sections_of("<think>")
    text = StoppableText(Spelled(["<think>", "a STOP b", "</think>", "c ST", "OP d"]), StopStrings(["STOP"]), ReasoningSplitter(sections))
    pieces = [text.push(i) for i in range(5)]
    assert "".join(piece.reasoning for piece in pieces) == "a STOP b"
    assert "".join(piece.text for piece in pieces) == "c "
    assert pieces[-1].stopped


@pytest.mark.parametrize(
    ("source", "setting", "expected"),
    [
        ("{{ enable_thinking }}", "off", {"enable_thinking": False}),
        ("{{ enable_thinking }}", "on", {"enable_thinking": True}),
        ("{% if thinking is undefined %}{% set thinking = true %}{% endif %}{{ thinking }}", "off", {"thinking": False}),
        ("{{ thinking_mode }}", "off", {"thinking_mode": "disabled"}),
        ("{{ thinking_budget }}", "off", {"thinking_budget": 0}),
        ("{{ reasoning_effort or 'medium' }}", "off", {"reasoning_effort": "low"}),
        ("{{ reasoning_effort or 'medium' }}", "on", {}),
        ("{{ reasoning_effort or 'no_think' }}", "off", {"reasoning_effort": "no_think"}),
        ("{{ reasoning_effort or 'no_think' }}", "on", {"reasoning_effort": "high"}),
        ("{{ reasoning_effort }}{{ enable_thinking }}", "low", {"reasoning_effort": "low", "enable_thinking": True}),
    ],
)
def test_thinking_options(source, setting, expected):
    assert ChatTemplate(source).thinking_options(setting) == expected


def test_a_template_without_a_switch_says_so():
    with pytest.raises(TemplateError, match="no switch for thinking"):
        ChatTemplate("{{ messages }}").thinking_options("on")
    with pytest.raises(TemplateError, match="no effort"):
        ChatTemplate("{{ enable_thinking }}").thinking_options("high")
    with pytest.raises(TemplateError, match="expected one of"):
        ChatTemplate("{{ enable_thinking }}").thinking_options("perhaps")
