"""Running a chat template: a program that came with a downloaded file.

In: template source, variables. Out: text. Every loop step, call, filter, concatenation and piece of output is counted against a
budget that follows from the size of the input, so that no template takes long or much memory; TemplateError says what it exceeded.
"""

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from time import monotonic
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from .errors import TemplateError

MAX_SOURCE_CHARS = 1_000_000
MAX_LOOP_STEPS = 5_000_000
MAX_RENDER_S = 20.0
MAX_VALUE = 1_000_000  # characters or items of one value, beyond four times those of the input
MAX_TRAFFIC = 128_000_000  # characters and items in all values together, beyond 500 times those of the input
MAX_INTEGER_BITS = 4096
_BUDGET = "_colibri_budget"
_WIDE_FORMAT = re.compile(r"\d{5,}|\*|\{[^}]*\{")  # a width given as a large number, or by an argument


class TemplateRefusal(TemplateError):
    """The template itself says that it does not take this conversation."""


class Budget:
    """Work and memory left to one rendering of an input of `size` characters and items."""

    def __init__(self, size: int):
        self._events = self._steps = self._traffic = 0
        self._deadline = monotonic() + MAX_RENDER_S
        self._max_value, self._max_traffic = MAX_VALUE + 4 * size, MAX_TRAFFIC + 500 * size

    def step(self) -> None:
        """One more turn of a loop, or call."""
        self._steps += 1
        if self._steps > MAX_LOOP_STEPS:
            raise TemplateError(f"the chat template takes more than {MAX_LOOP_STEPS} loop steps for this conversation")
        self._check_time()

    def expect(self, size: int) -> None:
        """Refuse a value of `size` characters or items before it is made."""
        if size > self._max_value:
            raise TemplateError(f"the chat template makes a value of {size} characters or items, more than {self._max_value}")

    def expect_nested(self, value: Any) -> None:
        """Refuse a value that holds too much to be written, compared or repeated."""
        self.expect(nested_size(value, self._max_value))

    def made(self, value: Any) -> Any:
        """The value, counted."""
        self.expect_nested(value)
        self._traffic += len(value) if isinstance(value, str | list | tuple | dict) else 0
        if self._traffic > self._max_traffic:
            raise TemplateError(f"the chat template writes or copies more than {self._max_traffic} characters for this conversation")
        self._check_time()
        return value

    def text(self, value: Any) -> str:
        """str(value), refused before it is made when it would be too long."""
        self.expect_nested(value)
        return str(value)

    def _check_time(self) -> None:
        self._events += 1
        if self._events % 256 == 1 and monotonic() > self._deadline:
            raise TemplateError(f"the chat template takes longer than {MAX_RENDER_S:.0f} s for this conversation")


def nested_size(value: Any, limit: int = sys.maxsize) -> int:
    """Characters and items in nested lists and mappings, counted until they are more than `limit`.

    What is in a list twice counts twice: so it will when the list is written or compared.
    """
    size, left = 0, [value]
    while left and size <= limit:
        item = left.pop()
        if isinstance(item, str):
            size += len(item)
        elif isinstance(item, Mapping):
            size += 2 * len(item)
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            size += len(item)
            left += item
    return size


def render(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The template's text. Raises TemplateError, and whatever the template's expressions raise."""
    return template.render(variables | {_BUDGET: Budget(nested_size(list(variables.values())))})


def _budget_of(context: Context) -> Budget:
    budget = context.parent.get(_BUDGET)  # not resolve(): a template's own variables come first there
    if not isinstance(budget, Budget):
        raise TemplateError(f"the chat template uses the name {_BUDGET}, which is reserved")
    return budget


@jinja2.pass_context
def _counted(context: Context, items: Any) -> Any:
    """The items of a loop, each one counted."""
    return items if isinstance(items, Undefined) else _counting(_budget_of(context), items)


def _counting(budget: Budget, items: Any) -> Iterator[Any]:
    for item in items:
        budget.step()
        yield item


@jinja2.pass_context
def _joined(context: Context, parts: tuple[Any, ...]) -> str:
    """What `a ~ b` gives."""
    budget = _budget_of(context)
    texts = [budget.text(part) for part in parts]
    budget.expect(sum(map(len, texts)))
    return budget.made("".join(texts))


@jinja2.pass_context
def _written(context: Context, value: Any) -> Any:
    """A piece of output, in macros and set blocks too."""
    budget = _budget_of(context)
    return budget.made(budget.text(value))


@jinja2.pass_context
def _nested(context: Context, value: Any) -> Any:
    """A list, tuple or dictionary that a template writes out."""
    return _budget_of(context).made(value)


class _Counting(NodeTransformer):
    """Loops, concatenations, output and containers through the functions above."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None, lineno=node.lineno)
        return node

    def visit_TemplateData(self, node: nodes.TemplateData) -> nodes.Node:
        return nodes.Const(node.data, lineno=node.lineno)  # constants are written through `_written`, template data is not

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(node, "_nested", [], [], None, None, lineno=node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return node if node.ctx != "load" else nodes.Filter(node, "_nested", [], [], None, None, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return nodes.Filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), "_joined", [], [], None, None, lineno=node.lineno)


class _GenerationTag(Extension):
    """{% generation %} ... {% endgeneration %} marks the assistant's text for training; for rendering it is a plain block."""

    tags = {"generation"}  # noqa: RUF012 - the name and type jinja2 asks for

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Environment(ImmutableSandboxedEnvironment):
    """jinja2's sandbox with what published templates use, everything counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], finalize=_written)
        self.filters["tojson"] = _to_json
        self.filters = {name: _bounded_filter(name, function) for name, function in self.filters.items()}
        self.filters |= {"_counted": _counted, "_joined": _joined, "_nested": _nested}
        del self.globals["lipsum"]
        functions: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals.update(functions)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Counting().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget_of(context)
        if operator == "%" and isinstance(left, str):
            _refuse_wide_format(left)
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            budget.expect(nested_size(left) + nested_size(right))
        elif operator == "*":
            _check_product(budget, left, right)
        elif operator == "**" and isinstance(left, int | float) and isinstance(right, int | float) and (abs(left) > 1e6 or abs(right) > 64):
            raise TemplateError(f"the chat template computes {str(left)[:20]} ** {str(right)[:20]}")
        return budget.made(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget_of(context)
        budget.step()
        if isinstance(obj, LoopContext) and args:  # the next level of a recursive loop
            args = (_counting(budget, args[0]), *args[1:])
        elif isinstance(text := getattr(obj, "__self__", None), str):
            _check_text_call(budget, text, getattr(obj, "__name__", ""), [*args, *kwargs.values()])
        return budget.made(super().call(context, obj, *args, **kwargs))


def _check_product(budget: Budget, left: Any, right: Any) -> None:
    for items, times in ((left, right), (right, left)):
        if isinstance(items, str | list | tuple) and isinstance(times, int):
            budget.expect(nested_size(items) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_INTEGER_BITS:
        raise TemplateError(f"the chat template computes with numbers of more than {MAX_INTEGER_BITS} bits")


def _check_text_call(budget: Budget, text: str, method: str, arguments: list[Any]) -> None:
    """Refuse a method of str, or a filter, whose result would be too large."""
    if method in ("format", "format_map"):
        _refuse_wide_format(text)
    if method == "replace" and len(arguments) > 1:
        old, new = str(arguments[0]), str(arguments[1])
        budget.expect((text.count(old) if old else len(text) + 1) * len(new))
    if method == "join" and arguments:
        items = arguments[0] if isinstance(arguments[0], list | tuple) else ()
        budget.expect(sum(len(item) for item in items if isinstance(item, str)) + len(text) * len(items))
    for argument in arguments:
        if isinstance(argument, int) and method not in ("replace", "format"):  # a width, which makes as many characters
            budget.expect(abs(argument) * (text.count("\t") + 1 if method == "expandtabs" else 1))


def _refuse_wide_format(text: str) -> None:
    if _WIDE_FORMAT.search(text):
        raise TemplateError(f"the chat template formats with {text[:40]!r}: widths of five digits or from arguments are not supported")


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, its size checked before and after. With a context it is never run while compiling, when there is no budget."""
    first = getattr(getattr(function, "jinja_pass_arg", None), "name", "")

    @jinja2.pass_context
    def bounded(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget, given = _budget_of(context), [*args, *kwargs.values()]
        budget.step()
        budget.expect_nested(value)  # before it is turned into text, or repeated
        if isinstance(value, str):
            _check_text_call(budget, value, name, given)
        elif name == "join":
            value = list(value) if value is not None and not isinstance(value, Undefined) else value
            _check_text_call(budget, str(given[0]) if given else "", "join", [value])
        else:
            budget.expect(max([argument for argument in given if isinstance(argument, int)], default=0))
        leading = {"context": (context,), "eval_context": (context.eval_ctx,), "environment": (context.environment,)}.get(first, ())
        return budget.made(function(*leading, value, *args, **kwargs))

    return bounded


def _to_json(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """JSON as models saw it in training: no HTML escapes, no ASCII escapes, keys in their order."""
    value = list(value) if isinstance(value, Iterator) else value  # what jinja2's map and select give
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefusal(f"the chat template refuses this conversation: {' '.join(str(message).split())[:300]}")


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
