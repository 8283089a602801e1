"""A conversation as the token ids a model was trained on.

In: messages, tokenizer, chat template. Out: token ids, and in which section of its text the model will begin.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .errors import TemplateError
from .reasoning import Section, open_section, sections_of

_MARK = re.compile("\ue000(\\d+)\ue001")  # stands for a content while the template is rendered; private-use characters
_TEXTS = ("content", "reasoning_content", "text")  # keys of a message, or of a part of its content, that hold what someone wrote


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """token_ids; sections the model's text may have; inside, the one that the prompt has opened."""

    token_ids: list[int]
    sections: tuple[Section, ...] = ()
    inside: Section | None = None


def is_conversation(prompt: Any) -> bool:
    """Whether a prompt is a list of messages."""
    return not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def encode_messages(messages: Any, tokenizer: Any, template: Any, tools: Any, options: Mapping[str, Any]) -> EncodedPrompt:
    """Render and encode a conversation. Raises TemplateError, TokenizerError."""
    if template is None:
        raise TemplateError("this model has no chat template: give the prompt as text, or convert a model that has one")
    marked, contents = set_apart(messages, tokenizer)
    variables = {**({"tools": tools} if tools else {}), **options}
    rendered = template.render(marked, add_generation_prompt=True, **variables)
    token_ids: list[int] = []
    for i, piece in enumerate(_MARK.split(rendered)):  # template text, number of a content, template text, ...
        token_ids += tokenizer.encode(contents[int(piece)]) if i % 2 else tokenizer.encode(piece, special=True)
    sections = sections_of(template.source, tools=bool(tools))
    inside = open_section(sections, _opening_of_answer(template, marked, variables, rendered)) if sections else None
    return EncodedPrompt(tokenizer.with_bos(token_ids), sections, inside)


def _opening_of_answer(template: Any, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], rendered: str) -> str:
    """The end of a rendered conversation with which the model's turn begins.

    What comes before it was written by people and documents: a <think> there opens nothing.
    """
    try:
        without = template.render(messages, add_generation_prompt=False, **variables)
    except TemplateError:  # some templates refuse a conversation that ends with the user's turn
        without = ""
    if without and rendered.startswith(without):
        return rendered[len(without) :]
    last = str(messages[-1].get("content") or "").strip()
    return rendered[rendered.rfind(last) + len(last) :] if last in rendered else rendered


def set_apart(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> tuple[list[Mapping[str, Any]], list[str]]:
    """Messages whose contents cannot forge control tokens, and the contents that were replaced by marks.

    What a user or a document wrote may spell a control token such as <|im_end|>. Such a content is replaced by a mark that is
    encoded afterwards as plain text; all others stay as they are, since a template may look at them and since tokens may
    span the border between a content and the template's text.
    """
    contents: list[str] = []

    def marked(value: Any) -> Any:
        """A text as it is or as a mark; of a list of parts, each part's texts."""
        if isinstance(value, list):
            return [_with_texts(part, marked) if isinstance(part, Mapping) else part for part in value]
        if not isinstance(value, str) or (not _MARK.search(value) and tokenizer.encode(value, special=True) == tokenizer.encode(value)):
            return value
        contents.append(value)
        return f"\ue000{len(contents) - 1}\ue001"

    return [_with_texts(message, marked) for message in messages], contents


def _with_texts(mapping: Mapping[str, Any], change: Callable[[Any], Any]) -> Mapping[str, Any]:
    return {key: change(value) if key in _TEXTS else value for key, value in mapping.items()}
