"""A model's chat template: a conversation becomes the text the model was trained on.

In: messages, the template a model directory carries. Out: one string. Templates are programs that come with downloaded
files, so they run in a sandbox, with bounds on their output and their work.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from .errors import TemplateError
from .template_sandbox import MAX_SOURCE_CHARS, Environment, TemplateRefusal, render

THINKING = ("on", "off", "low", "medium", "high")
_LEAST_EFFORTS = ("no_think", "none", "minimal", "low")


class ChatTemplate:
    """One compiled chat template; rendering changes nothing in it, threads may share it.

    Parameters
    ----------
    source : the template, or several by name ("default", and "tool_use" for conversations with tools)
    bos_token, eos_token : what the template may write at the start of a text and at the end of a turn

    Attributes
    ----------
    source : the text of all variants
    variables : names it reads that can be given as options
    builtin : the name of this library's template that stands in for the model's missing one, None for the model's own
    """

    def __init__(
        self, source: str | Mapping[str, str], *, bos_token: str | None = None, eos_token: str | None = None, builtin: str | None = None
    ):
        sources = {"default": source} if isinstance(source, str) else dict(source)
        if "default" not in sources:
            raise TemplateError(f"the chat template has the variants {', '.join(sources) or '(none)'}, expected one named default")
        environment = Environment()
        self._templates = {name: _compile(environment, name, text) for name, text in sources.items()}
        self.source = "\n".join(sources.values())
        self.variables = _variables_of(environment, sources["default"])
        self.builtin = builtin
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
        template = template or self._templates["default"]
        try:
            return _rendered(template, variables)
        except TemplateRefusal as error:
            # Some models were trained without system messages (Gemma 2); theirs belong to the first question then.
            merged = _with_system_in_user(variables["messages"]) if "system" in str(error).lower() else None
            if merged is None:
                raise
            return _rendered(template, variables | {"messages": merged})


    def thinking_options(self, setting: str) -> dict[str, Any]:
        """The template's variables for "on", "off", or an effort of "low", "medium" or "high", to be given to `render`.

        Raises TemplateError when the template has no such switch. Models without one that can be turned off think as little as
        they can with "off".
        """
        if setting not in THINKING:
            raise TemplateError(f"thinking is {setting!r}, expected one of {', '.join(THINKING)}")
        effort = {"reasoning_effort": setting} if "reasoning_effort" in self.variables else {}
        if setting in ("low", "medium", "high"):
            if not effort:
                raise TemplateError(f"this model's chat template knows no effort of thinking such as {setting!r}")
            return self._switch(True) | effort
        options = self._switch(setting == "on")
        if effort and not options:
            known = [word for word in _LEAST_EFFORTS if f"'{word}'" in self.source or f'"{word}"' in self.source]
            least = known[0] if known else "low"
            # Where not thinking is the default, thinking must be asked for; elsewhere the template's own default is on.
            options = {"reasoning_effort": least} if setting == "off" else {"reasoning_effort": "high"} if least == "no_think" else {}
        elif not options:
            raise TemplateError("this model's chat template has no switch for thinking")
        return options

    def _switch(self, on: bool) -> dict[str, Any]:
        switches: dict[str, Any] = {name: on for name in ("enable_thinking", "thinking", "reasoning") if name in self.variables}
        if "thinking_mode" in self.variables:
            switches["thinking_mode"] = "enabled" if on else "disabled"
        if "thinking_budget" in self.variables:
            switches["thinking_budget"] = -1 if on else 0
        return switches


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
    source = _json_object(folder / "chat_template.json").get("chat_template", config.get("chat_template"))
    if isinstance(source, list):
        source = {str(variant.get("name")): str(variant.get("template")) for variant in source if isinstance(variant, dict)}
    elif source is not None and not isinstance(source, str):
        raise TemplateError(f"{folder}: chat_template is a {type(source).__name__}, expected text")
    if not file.is_file():
        return source or None
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"{file}: cannot be read as UTF-8 ({error})") from error
    return {**source, "default": text} if isinstance(source, dict) else text


def _json_object(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise TemplateError(f"{path}: cannot be read ({error.strerror}): check the drive, then copy the model again") from error
    except ValueError as error:
        raise TemplateError(f"{path}: is not JSON ({error})") from error
    return found if isinstance(found, dict) else {}


def _token_text(value: Any) -> str | None:
    """A special token is text, or an object with its content."""
    return value.get("content") if isinstance(value, dict) else value


def _variables_of(environment: Environment, source: str) -> frozenset[str]:
    own = {"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"}
    return frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)) - own)


def _compile(environment: Environment, name: str, source: str) -> jinja2.Template:
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"chat template {name!r} has {len(source)} characters, at most {MAX_SOURCE_CHARS} are accepted")
    try:
        return environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template {name!r}, line {error.lineno}: {_one_line(error)}") from error
    except (RecursionError, MemoryError) as error:
        raise TemplateError(f"chat template {name!r} is nested too deeply") from error


def _rendered(template: jinja2.Template, variables: dict[str, Any]) -> str:
    try:
        return render(template, variables)
    except TemplateError:
        raise
    except jinja2.UndefinedError as error:
        raise TemplateError(f"the chat template misses a value, to be given as an option of the template: {_one_line(error)}") from error
    except RecursionError as error:
        raise TemplateError("the chat template recurses too deeply") from error
    except Exception as error:  # a template may raise whatever its expressions raise: TypeError, ValueError, OverflowError ...
        what = f"{type(error).__name__}: {_one_line(error)}"
        if variables["tools"] is None and isinstance(error, TypeError) and "NoneType" in str(error):
            raise TemplateError(f"the chat template works with tools only, and none are given ({what})") from error
        raise TemplateError(f"the chat template fails on this conversation: {what}") from error


def _with_system_in_user(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """The conversation with its system message in front of the first user message, None if it has no such two."""
    if len(messages) < 2 or [message["role"] for message in messages[:2]] != ["system", "user"]:
        return None
    contents = [content for message in messages[:2] if isinstance(content := message.get("content"), str)]
    if len(contents) < 2:
        return None
    return [{**messages[1], "content": "\n\n".join(contents)}, *messages[2:]]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
