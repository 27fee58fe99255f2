"""A checkpoint's chat template, run so that a faulty one can spoil an answer and nothing else.

The language is Jinja as Hugging Face sets it up for `apply_chat_template`: sandboxed, blocks trimmed, loop controls,
the ``generation`` tag, and the functions ``raise_exception`` and ``strftime_now``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sized
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kafila.errors import ModelError

MAX_STEPS = 200_000
"""Loop turns and macro calls of one rendering: a second or two, in which its member answers nobody. Real templates take
a few for each message, or go through all for each; the sandbox alone bounds one loop (range stops at 100,000) and not a
loop within a loop."""

MAX_LENGTH = 10_000_000
"""Of a text or list that is multiplied, and of a number in bits: beyond any context, and little memory."""

_FAULTS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What running a template's expressions can raise: its own complaints, and Python's about the values."""


class ChatTemplate:
    """A compiled template. ``name`` says in errors which one it is; ``clock`` gives the date that it may write.

    Raises `ModelError` where the source is not Jinja. One thread at a time may render.
    """

    def __init__(self, source: str, name: str, clock: Callable[[], datetime]) -> None:
        self._name = name
        self._environment = _Environment(clock)
        try:
            tree = self._environment.parse(source)
            _count_steps(tree)
            code = self._environment.compile(tree, name="chat template")
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"{name} is not a chat template: {_one_line(error)}") from error
        self._template = jinja2.Template.from_code(self._environment, code, self._environment.make_globals(None))

    def render(self, variables: Mapping[str, Any]) -> str:
        """The text for ``variables`` (JSON values). Raises `ModelError` where the template refuses or fails."""
        self._environment.steps_left = MAX_STEPS
        try:
            return self._template.render(variables)
        except _Refusal as refusal:
            raise ModelError(f"{self._name} refuses this conversation: {_one_line(refusal)}") from refusal
        except _FAULTS as error:
            raise ModelError(f"{self._name} fails on this conversation: {_one_line(error)}") from error


class _Refusal(jinja2.TemplateError):
    """The template called ``raise_exception``."""


class _GenerationTag(Extension):
    """``{% generation %}`` marks what the model wrote, for training; in an answer it changes nothing."""

    tags = {"generation"}  # noqa: RUF012  - declared so by jinja2

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})  # what makes much of little

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.steps_left = 0
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: clock().strftime(form)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """As the sandbox's, unless the result would be out of all bounds."""
        match left, right:
            case int(), int():
                length = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            case (Sized() as many, int(times)) | (int(times), Sized() as many):
                length = len(many) * times
            case _:
                length = 0
        if length > MAX_LENGTH:
            raise jinja2.TemplateError(f"the result of {operator} would be too large")
        return super().call_binop(context, operator, left, right)

    def step(self) -> bool:
        """Called by the compiled template wherever it can go round; true, so that it can stand in a condition."""
        self.steps_left -= 1
        if self.steps_left < 0:
            raise jinja2.TemplateError(f"it has taken {MAX_STEPS:,} steps and goes on")
        return True


def _count_steps(tree: nodes.Template) -> None:
    """Have every loop's turn, every test of a filtered loop, and every macro call take a step."""

    def step(line: int) -> nodes.Call:
        return nodes.Call(nodes.EnvironmentAttribute("step"), [], [], None, None, lineno=line)

    for loop in list(tree.find_all(nodes.For)):
        if loop.test is not None:
            loop.test = nodes.And(step(loop.lineno), loop.test, lineno=loop.lineno)
        loop.body.insert(0, nodes.ExprStmt(step(loop.lineno), lineno=loop.lineno))
    for macro in list(tree.find_all(nodes.Macro)):
        macro.body.insert(0, nodes.ExprStmt(step(macro.lineno), lineno=macro.lineno))


def _raise_exception(message: str) -> NoReturn:
    raise _Refusal(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, as models were trained on it; jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
