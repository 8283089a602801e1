"""A model's chat template: a conversation becomes the text the model was trained on.

In: messages, the template a model directory carries. Out: one string. Templates are programs that come with downloaded
files, so they run in a sandbox, with bounds on their output and their work.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment

from .errors import TemplateError

MAX_OUTPUT_CHARS = 64 * 1024 * 1024
MAX_LOOP_STEPS = 5_000_000
MAX_RENDER_S = 20.0
_BUDGET = "_colibri_budget"


class ChatTemplate:
    """One compiled chat template; rendering changes nothing in it, threads may share it.

    Parameters
    ----------
    source : the template, or several by name ("default", and "tool_use" for conversations with tools)
    bos_token, eos_token : what the template may write at the start of a text and at the end of a turn
    """

    def __init__(self, source: str | Mapping[str, str], *, bos_token: str | None = None, eos_token: str | None = None):
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise TemplateError(f"the chat template has the variants {', '.join(sources) or '(none)'}, expected one named default")
        environment = _environment()
        self._templates = {name: _compile(environment, name, text) for name, text in sources.items()}
        self.source = sources["default"]
        self.bos_token, self.eos_token = bos_token or "", eos_token or ""

    @classmethod
    def load(cls, model_dir: str | Path) -> "ChatTemplate | None":
        """The template of a model directory, None if it has none.

        Looks at chat_template.jinja, chat_template.json and tokenizer_config.json; BOS and EOS come from the manifest
        (colibri.json) or tokenizer_config.json.
        """
        folder = Path(model_dir)
        config = _json_object(folder / "tokenizer_config.json")
        entry = _json_object(folder / "colibri.json").get("tokenizer") or {}
        source = _find_source(folder, config)
        if source is None:
            return None
        tokens = {key: _token_text(config.get(key)) or _token_text(entry.get(key)) for key in ("bos_token", "eos_token")}
        return cls(source, **tokens)

    def render(
        self,
        messages: Iterable[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **extras: Any,
    ) -> str:
        """The conversation as text, ready to be encoded with special=True.

        Parameters
        ----------
        messages : {"role", "content"} and what else the template knows ("tool_calls", ...)
        add_generation_prompt : end with the opening of the assistant's turn
        tools : JSON schemas of functions the model may call
        extras : further variables of the template, such as enable_thinking

        Raises TemplateError: the template refuses the conversation, fails, or exceeds its bounds.
        """
        template = self._templates.get("tool_use") if tools else None
        variables = {
            "messages": [_checked_message(message) for message in messages],
            "add_generation_prompt": add_generation_prompt,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **({"tools": list(tools)} if tools else {"tools": None}),
            **extras,
        }
        return _bounded_render(template or self._templates["default"], variables)


def missing_template(model_name: str) -> TemplateError:
    """The error for a conversation with a model that has no chat template."""
    return TemplateError(
        f"{model_name} has no chat template, so it cannot take a list of messages; "
        "use an instruction-tuned model, add its chat_template.jinja, or give the prompt as plain text"
    )


def _checked_message(message: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise TemplateError(f"a message is {str(message)[:60]!r}, expected a mapping with role and content")
    return dict(message)


def _find_source(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TemplateError(f"{file}: cannot be read as UTF-8 ({error})") from error
    source = _json_object(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(source, list):
        return {str(variant.get("name")): str(variant.get("template")) for variant in source if isinstance(variant, dict)}
    if source is None or isinstance(source, str):
        return source or None
    raise TemplateError(f"{folder}: chat_template is a {type(source).__name__}, expected text")


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise TemplateError(f"{path}: is not JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def _token_text(value: Any) -> str | None:
    """A special token is text, or an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _compile(environment: "_Environment", name: str, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template {name!r}, line {error.lineno}: {_one_line(error)}") from error
    except RecursionError as error:
        raise TemplateError(f"chat template {name!r} is nested too deeply") from error


def _bounded_render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    budget = _Budget()
    parts: list[str] = []
    try:
        for part in template.generate(variables | {_BUDGET: budget}):
            parts.append(part)
            budget.wrote(len(part))
    except TemplateError:
        raise
    except jinja2.UndefinedError as error:
        raise TemplateError(f"the chat template misses a value: {_one_line(error)}") from error
    except RecursionError as error:
        raise TemplateError("the chat template recurses too deeply") from error
    except Exception as error:  # a template may raise whatever its expressions raise: TypeError, ValueError, OverflowError ...
        raise TemplateError(f"the chat template fails on this conversation: {type(error).__name__}: {_one_line(error)}") from error
    return "".join(parts)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


class _Budget:
    """Work and output left to one rendering."""

    def __init__(self) -> None:
        self._steps, self._chars, self._deadline = 0, 0, monotonic() + MAX_RENDER_S

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_LOOP_STEPS:
            raise TemplateError(f"the chat template takes more than {MAX_LOOP_STEPS} loop steps for this conversation")
        if self._steps % 1024 == 0:
            self._check_time()

    def wrote(self, chars: int) -> None:
        self._chars += chars
        if self._chars > MAX_OUTPUT_CHARS:
            raise TemplateError(f"the chat template writes more than {MAX_OUTPUT_CHARS} characters for this conversation")
        self._check_time()

    def _check_time(self) -> None:
        if monotonic() > self._deadline:
            raise TemplateError(f"the chat template takes longer than {MAX_RENDER_S:.0f} s for this conversation")


@jinja2.pass_context
def _count_steps(context: Context, items: Any) -> Any:
    """The items of a loop, each one counted against the rendering's budget."""
    budget = context.resolve(_BUDGET)
    if isinstance(items, Undefined) or not isinstance(budget, _Budget):
        return items

    def counted() -> Iterator[Any]:
        for item in items:
            budget.step()
            yield item

    return counted()


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; for rendering it is a plain block."""

    tags = {"generation"}  # noqa: RUF012 - the name and type jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox, in which loops are counted and repeating or raising to a power cannot exhaust memory."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            if not loop.recursive:
                loop.iter = nodes.Filter(loop.iter, "_count_steps", [], [], None, None, lineno=loop.lineno)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for items, times in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(times, int) and len(items) * times > MAX_LOOP_STEPS:
                    raise TemplateError(f"the chat template repeats {len(items)} characters or items {times} times")
        if operator == "**" and (abs(left) > 1e6 or abs(right) > 64):
            raise TemplateError(f"the chat template computes {left} ** {right}")
        return super().call_binop(context, operator, left, right)


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag])
    environment.filters["tojson"] = _to_json
    environment.filters["_count_steps"] = _count_steps
    functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(functions)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as models saw it in training: no HTML escapes, no ASCII escapes, keys in their order."""
    value = list(value) if isinstance(value, Iterator) else value  # what jinja2's map and select give
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(f"the chat template refuses this conversation: {' '.join(str(message).split())[:300]}")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
