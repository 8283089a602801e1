"""Where a model's text is its reasoning, a tool call, or the answer.

In: text as it streams, markers included; the chat template, which says what markers the model writes. Out: text by channel.
The answer never has reasoning in it, whatever the model: think blocks, gpt-oss' channels, Gemma's thought channel and others.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import regex

ANSWER, REASONING, TOOL_CALL = "answer", "reasoning", "tool_call"


@dataclass(frozen=True)
class Section:
    """A part of a model's text between two markers.

    literal   the template of a model that writes such sections holds this
    start     pattern of the opening marker; a group named `to` is the beginning of the section's text
    end       pattern of the closing marker, "" for a section that lasts until the text ends
    channel   whose text it is
    controls  tokens of the markers that the vocabulary may list as control tokens, which are not text otherwise
    """

    literal: str
    start: str
    end: str
    channel: str = REASONING
    controls: tuple[str, ...] = ()

    def opening(self) -> "regex.Pattern[str]":
        return regex.compile(self.start)

    def closing(self) -> "regex.Pattern[str] | None":
        return regex.compile(rf"\s*(?:{self.end})") if self.end else None


def _block(name: str, end: str = "", channel: str = REASONING) -> Section:
    """A section between <name> and </name>, or any two literal markers."""
    start, end = (name, end) if end else (f"<{name}>", f"</{name}>")
    return Section(start, regex.escape(start), regex.escape(end), channel, (start, end))


_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>")
_HARMONY_END = r"<\|end\|>|<\|return\|>|<\|call\|>"
_HARMONY_HEAD = r"(?:<\|start\|>assistant)?"
_SOLAR_HEAD = r"(?:<\|begin\|>assistant)?"
_REASONING = (
    _block("think"),
    _block("seed:think"),
    _block("mm:think"),
    Section("':opensource'", "<think:opensource>", "</think:opensource>", controls=("<think:opensource>", "</think:opensource>")),
    _block("[THINK]", "[/THINK]"),
    _block("<|START_THINKING|>", "<|END_THINKING|>"),
    Section("<|channel>", r"<\|channel>thought\n?", r"<channel\|>", controls=("<|channel>", "<channel|>")),
    Section("<|channel|>analysis", rf"{_HARMONY_HEAD}<\|channel\|>analysis<\|message\|>", _HARMONY_END, controls=_HARMONY),
    Section(
        "<|channel|>final",
        rf"{_HARMONY_HEAD}<\|channel\|>(?:final|commentary)[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
        _HARMONY_END,
        ANSWER,
    ),
    Section("Here are my reasoning steps:", "Here are my reasoning steps:", r"\[BEGIN FINAL RESPONSE\]"),
    Section("<|open|>", r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>", controls=("<|open|>", "<|close|>", "<|sep|>")),
    Section("<|open|>", r"<\|open\|>response<\|sep\|>", r"<\|close\|>response<\|sep\|>", ANSWER),
    Section(
        "<|begin|>assistant", rf"{_SOLAR_HEAD}<\|think\|>", r"<\|end\|>", controls=("<|begin|>", "<|think|>", "<|content|>", "<|end|>")
    ),
    Section("<|begin|>assistant", rf"{_SOLAR_HEAD}<\|content\|>", r"<\|end\|>", ANSWER),
    _block("response", channel=ANSWER),
)
_TOOL_CALLS = (
    _block("tool_call", channel=TOOL_CALL),
    _block("tool_calls", channel=TOOL_CALL),
    _block("seed:tool_call", channel=TOOL_CALL),
    _block("minimax:tool_call", channel=TOOL_CALL),
    _block("TOOLCALL", channel=TOOL_CALL),
    _block("<|tool_call_start|>", "<|tool_call_end|>", TOOL_CALL),
    _block("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", TOOL_CALL),
    _block("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", TOOL_CALL),
    _block("<|tool_call>", "<tool_call|>", TOOL_CALL),
    _block("<|START_ACTION|>", "<|END_ACTION|>", TOOL_CALL),
    _block("<|tools_prefix|>", "<|tools_suffix|>", TOOL_CALL),
    Section("[TOOL_CALLS]", r"\[TOOL_CALLS\]", "", TOOL_CALL, ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    Section("<|python_tag|>", r"<\|python_tag\|>", "", TOOL_CALL, ("<|python_tag|>",)),
    Section("<|tool_call|>", r"<\|tool_call\|>", "", TOOL_CALL, ("<|tool_call|>",)),
    Section(
        "<|channel|>commentary",
        rf"{_HARMONY_HEAD}(?: to=(?P<to>[^\s<]+))?<\|channel\|>commentary(?: to=(?P<to>[^\s<]+))\s*(?:<\|constrain\|>[^<]*)?<\|message\|>"
        rf"|{_HARMONY_HEAD} to=(?P<to>[^\s<]+)<\|channel\|>commentary[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
        _HARMONY_END,
        TOOL_CALL,
        _HARMONY,
    ),
)


def sections_of(template: str, *, tools: bool = False) -> tuple[Section, ...]:
    """The sections that a model with this chat template writes; those of tool calls only when there are tools."""
    calls = [section for section in _TOOL_CALLS if section.literal in template] if tools else []
    return (*calls, *(section for section in _REASONING if section.literal in template))


def open_section(sections: Sequence[Section], prompt: str) -> Section | None:
    """The section in which a prompt's text ends, so that the model's text begins in it; None for none."""
    for section in sections:
        starts = list(section.opening().finditer(prompt))
        closing = section.closing()
        if starts and closing is not None and closing.search(prompt, starts[-1].end()) is None:
            return section
    return None


class ReasoningSplitter:
    """Tells a model's text apart by channel while it streams; what may be a marker's beginning is held back.

    sections   the model's (sections_of)
    inside     the section the prompt has opened already (open_section)
    """

    def __init__(self, sections: Sequence[Section], inside: Section | None = None):
        self._openings = [(section, section.opening()) for section in sections]
        # A closing marker without an opening one is no text either: some prompts have closed the reasoning before it began.
        stray = "|".join(section.end for section in sections if section.channel == REASONING and section.end)
        self._stray = regex.compile(stray) if stray else None
        self._held, self._inside, self._skip_space = "", inside, inside is not None
        self._partial = True  # whether more text may come

    def push(self, text: str) -> list[tuple[str, str]]:
        """(channel, text) of all that is certain now, in order."""
        self._held += text
        return self._read()

    def _read(self) -> list[tuple[str, str]]:
        pieces: list[tuple[str, str]] = []
        while self._held and (self._read_inside(pieces) if self._inside is not None else self._read_outside(pieces)):
            pass
        return pieces

    def flush(self) -> list[tuple[str, str]]:
        """What was held back and turned out to be no marker."""
        self._partial = False
        return self._read()

    def _read_inside(self, pieces: list[tuple[str, str]]) -> bool:
        """Read on in a section; whether its end was found."""
        assert self._inside is not None
        closing = self._inside.closing()
        found = closing.search(self._held, partial=self._partial) if closing is not None else None
        if not self._take_until(found, pieces):
            return False
        if self._inside.channel == TOOL_CALL:
            pieces.append((TOOL_CALL, "\n"))  # calls are told apart by lines
        self._inside, self._skip_space = None, True
        return True

    def _read_outside(self, pieces: list[tuple[str, str]]) -> bool:
        """Read on in the answer; whether a marker was found."""
        match, section = self._first_marker()
        if not self._take_until(match, pieces):
            return False
        self._skip_space, self._inside = True, section
        if match is not None and section is not None and (to := match.groupdict().get("to")):
            pieces.append((section.channel, f"{to} "))
        return True

    def _first_marker(self) -> tuple["regex.Match[str] | None", Section | None]:
        """(marker that begins first in what is held, the section it opens); a stray end opens none."""
        candidates: list[tuple[regex.Pattern[str], Section | None]] = [(pattern, section) for section, pattern in self._openings]
        if self._stray is not None:
            candidates.append((self._stray, None))
        found = [(match, section) for pattern, section in candidates if (match := pattern.search(self._held, partial=self._partial))]
        begins = min((match.start() for match, _ in found), default=0)
        here = [(match, section) for match, section in found if match.start() == begins]
        # A marker that is complete waits for one that begins as early and may become longer: the longer one is meant.
        return next((pair for pair in here if pair[0].partial), here[0] if here else (None, None))

    def _take_until(self, found: "regex.Match[str] | None", pieces: list[tuple[str, str]]) -> bool:
        """Emit the text before a marker and drop the marker; False when there is none, or not all of it yet."""
        end = len(self._held) if found is None else found.start()
        self._emit(pieces, self._held[:end])
        self._held = self._held[end:] if found is None or found.partial else self._held[found.end() :]
        return found is not None and not found.partial

    def _emit(self, pieces: list[tuple[str, str]], text: str) -> None:
        if self._skip_space:
            text = text.lstrip()
        if text:
            self._skip_space = False
            pieces.append((ANSWER if self._inside is None else self._inside.channel, text))
