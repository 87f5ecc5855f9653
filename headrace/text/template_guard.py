"""A Jinja environment whose templates cannot run away.

A chat template is a program that came with a model file. Jinja's sandbox keeps it from Python's internals but not from
`'x' * 10**10` or from loops inside loops. Every render here has a budget of time and of bytes made. It is spent

- at each turn of a loop, entry of a macro, and call (statements are inserted into the parsed template);
- by the size of every value made: text written, operators, literals, slices, results of calls and filters;
- in advance where a short expression can make a long value: `*`, `+`, `~`, `%`, `**`, `join`, `replace`, `format`.

Values already counted are not given back when they become garbage, so the budget also bounds the memory held. Only
str methods and filters that are known not to grow beyond their input, or are checked in advance, exist at all.
"""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from headrace.core.errors import HeadraceError


class TemplateError(HeadraceError, ValueError):
    """A chat template cannot be used, or refused these messages. The text is fit to show to a client."""


_STEP_BYTES = 128  # price of a loop turn, a call, an element: no less than the object it may make
_MAX_WIDTH = 10_000  # of padding, indents and decimals
_MAX_INT_BITS = 4_096
_MAX_UNSCANNED = 1_000  # elements of a sum of lists

_STR_METHODS = frozenset(
    "capitalize casefold center count endswith find format format_map index isalnum isalpha "  # noqa: SIM905
    "isascii isdecimal isdigit islower isnumeric isspace istitle isupper join ljust lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title upper zfill".split()
)
_FILTERS = frozenset(
    "abs attr capitalize count d default dictsort e escape first float format groupby indent "  # noqa: SIM905
    "int items join last length list lower map max min reject rejectattr replace reverse round safe select "
    "selectattr sort string sum title tojson trim truncate unique upper urlencode wordcount".split()
)
# Filters that look inside their elements.
_WALKS_VALUES = frozenset(("dictsort", "groupby", "max", "min", "sort", "unique"))


class Budget:
    """What one render may still spend. Raises TemplateError when it is gone."""

    __slots__ = ("_bytes_left", "_deadline", "_max_bytes", "_time_limit_s")

    def __init__(self, time_limit_s: float, max_bytes: int) -> None:
        self._time_limit_s = time_limit_s
        self._deadline = time.monotonic() + time_limit_s
        self._max_bytes = self._bytes_left = max_bytes

    def step(self) -> None:
        self.charge(_STEP_BYTES)

    def charge(self, num_bytes: int) -> None:
        self.admit(num_bytes)
        self._bytes_left -= num_bytes
        if time.monotonic() > self._deadline:
            raise TemplateError(f"the chat template ran for more than {self._time_limit_s:g} s and was stopped")

    def admit(self, num_bytes: int) -> None:
        """Refuse what would not fit, before it is made."""
        if num_bytes > self._bytes_left:
            raise TemplateError(
                f"the chat template makes more than {self._max_bytes / 2**20:.0f} MiB of text and was stopped"
            )

    def scan(self, value: Any) -> int:
        """Charge a value with all that hangs from it, shared parts as often as they are met; returns its size.

        Sharing is how a few nested literals become 2**40 elements for whoever prints or compares them.
        """
        size = 0
        pending = [value]
        while pending:
            value = pending.pop()
            cost = _STEP_BYTES + (len(value) if isinstance(value, str | bytes) else 0)
            size += cost
            self.charge(cost)
            if isinstance(value, Mapping):
                pending += value.keys()
                pending += value.values()
            elif isinstance(value, list | tuple | set | frozenset):
                pending += value
            elif isinstance(value, Namespace):  # shows all it holds when printed
                pending += value._Namespace__attrs.values()
        return size


class _Instrument(NodeTransformer):
    """Inserts the budget's checks into a parsed template. `environment.x` is reachable from compiled code only."""

    def _at(self, name: str, node: nodes.Node, *arguments: nodes.Expr) -> nodes.Call:
        hook = nodes.EnvironmentAttribute(name, lineno=node.lineno)
        return nodes.Call(hook, list(arguments), [], None, None, lineno=node.lineno)

    def _step(self, node: nodes.Node) -> nodes.ExprStmt:
        return nodes.ExprStmt(nodes.EnvironmentAttribute("guard_step", lineno=node.lineno), lineno=node.lineno)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._step(node))
        if node.test is not None:
            node.test = nodes.And(nodes.EnvironmentAttribute("guard_step"), node.test, lineno=node.lineno)
        return node

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, self._step(node))
        return node

    visit_CallBlock = visit_Macro

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        written = sum(len(child.data) for child in node.nodes if isinstance(child, nodes.TemplateData))
        self.generic_visit(node)
        if not written:
            return [node]
        charge = self._at("guard_written", node, nodes.Const(written, lineno=node.lineno))
        return [nodes.ExprStmt(charge, lineno=node.lineno), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._at("guard_concat", node, *node.nodes)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        return self._at("guard_slice", node, node) if isinstance(node.arg, nodes.Slice) else node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return self._at("guard_literal", node, node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return self._at("guard_literal", node, node) if node.ctx == "load" else node


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own convention)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _size(value: Any) -> int:
    return sys.getsizeof(value) if isinstance(value, str | bytes | list | tuple | dict | set) else _STEP_BYTES


def _check_widths(name: str, values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and value > _MAX_WIDTH:
            raise TemplateError(f"the chat template asks {name} for a width of {value}, more than {_MAX_WIDTH}")


class GuardedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it (as in Hugging Face transformers), within a budget.

    One environment serves any number of threads; the budget of the render under way belongs to its thread.
    """

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self, now: Callable[[], datetime]) -> None:
        # Without the optimizer and with a finalize that wants the context nothing is computed while compiling.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[LoopControlExtension, _GenerationTag],
            finalize=pass_context(self._finalize),
        )
        self._local = threading.local()
        own = {"join": self._join, "replace": self._replace, "format": self._format, "tojson": self._tojson}
        own |= {"string": self._string, "sum": self._sum, "safe": lambda value: value}
        self.filters = {name: own.get(name) or self._guarded(name, self.filters[name]) for name in _FILTERS}
        del self.globals["lipsum"]
        self.globals["dict"] = lambda *args, **kwargs: self.guard_literal(dict(*args, **kwargs))
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": lambda form: now().strftime(form[:256])}

    def use(self, budget: Budget) -> None:
        """The budget for what this thread renders next."""
        self._local.budget = budget

    @property
    def _budget(self) -> Budget:
        return self._local.budget

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Instrument().visit(tree)
        return tree

    # What _Instrument put into the templates.

    @property
    def guard_step(self) -> bool:
        self._budget.step()
        return True

    def guard_written(self, num_chars: int) -> None:
        self._budget.charge(num_chars)

    def guard_literal(self, value: Any) -> Any:
        self._budget.scan(value)
        return value

    def guard_slice(self, value: Any) -> Any:
        self._budget.charge(_size(value))
        return value

    def guard_concat(self, *values: Any) -> str:
        texts = [self._string(value) for value in values]
        self._budget.charge(sum(map(len, texts)))
        return "".join(texts)

    @staticmethod
    def _finalize(context: Context, value: Any) -> Any:
        environment = context.environment
        assert isinstance(environment, GuardedEnvironment)
        if isinstance(value, str):
            environment._budget.charge(_size(value))
            return value
        return environment._string(value)

    # What Jinja's sandbox lets one override.

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str):
            return attr in _STR_METHODS
        if isinstance(obj, bytes | int | float) and callable(value):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        inner = super().wrap_str_format(value)
        if inner is None:
            return None

        @wraps(inner)
        def guarded(*args: Any, **kwargs: Any) -> str:
            self._admit_format(value.__self__, [*args, *kwargs.values()])
            return inner(*args, **kwargs)

        return guarded

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(obj, "__self__", None)
        if owner is self:
            return obj(*args)
        budget = self._budget
        budget.step()
        if isinstance(owner, str):
            name = obj.__name__
            if name == "join":
                return self._join(args[0], owner)
            if name == "replace":
                return self._replace(owner, *args)
            if name in ("center", "ljust", "rjust", "zfill"):
                _check_widths(name, args)
        result = super().call(context, obj, *args, **kwargs)
        budget.charge(_size(result))
        return result

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = self._budget
        sequences = str | bytes | list | tuple
        if operator == "*":
            if isinstance(right, sequences):
                left, right = right, left
            if isinstance(left, sequences) and isinstance(right, int):
                inside = budget.scan(left) if isinstance(left, list | tuple) else _size(left)
                budget.charge(inside * max(right, 0))
                return left * right
        if operator == "%" and isinstance(left, str):
            return self._format(left, right)
        if isinstance(left, int) and isinstance(right, int) and operator in ("*", "**"):
            bits = left.bit_length()
            if (bits + right.bit_length() if operator == "*" else bits * right) > _MAX_INT_BITS:
                raise TemplateError(f"the chat template computes a number of more than {_MAX_INT_BITS} bits")
        elif operator == "+" and isinstance(left, sequences) and isinstance(right, sequences):
            budget.charge(_size(left) + _size(right))
            if not isinstance(left, str) and len(left) + len(right) > _MAX_UNSCANNED:
                budget.scan(left)
                budget.scan(right)
        return super().call_binop(context, operator, left, right)

    # Filters, and the str methods of the same names.

    def _guarded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        first = 1 if hasattr(function, "jinja_pass_arg") else 0

        @wraps(function)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            budget = self._budget
            budget.step()
            value = args[first] if len(args) > first else None
            if name in _WALKS_VALUES:
                budget.scan(value)
            if name in ("indent", "round"):
                widths = [*args[first + 1 :], *kwargs.values()]
                _check_widths(name, widths)
                if name == "indent":
                    longest = max((len(w) if isinstance(w, str) else int(w) for w in widths), default=4)
                    budget.admit(len(str(value)) + (str(value).count("\n") + 1) * longest)
            result = function(*args, **kwargs)
            budget.charge(_size(result))
            return result

        return guarded

    def _string(self, value: Any) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, int | float | None):
            self._budget.scan(value)
        text = str(value)
        self._budget.charge(_size(text))
        return text

    def _join(self, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        texts = [self._string(item) for item in value]
        self._budget.charge(sum(map(len, texts)) + len(d) * len(texts))
        return d.join(texts)

    def _replace(self, value: Any, old: str, new: str, count: int | None = None) -> str:
        text = self._string(value)
        found = text.count(old) if count is None or count < 0 else min(text.count(old), count)
        self._budget.charge(len(text) + found * len(new))
        return text.replace(old, new, -1 if count is None else count)

    def _format(self, value: Any, *args: Any, **kwargs: Any) -> str:
        text = self._string(value)
        self._admit_format(text, [*args, *kwargs.values()])
        result = text % (kwargs or (args[0] if len(args) == 1 else args))
        self._budget.charge(_size(result))
        return result

    def _admit_format(self, text: str, values: Iterable[Any]) -> None:
        """An upper bound of what `text` can become: its own widths, and in every field the largest value."""
        values = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
        widths = [int(digits[:18]) for digits in re.findall(r"\d+", text)]
        _check_widths("format", widths)
        if "*" in text or re.search(r"\{[^{}]*\{", text):  # widths that are values themselves
            _check_widths("format", values)
            widths += [_MAX_WIDTH] * len(values)
        largest = max((self._budget.scan(value) for value in values), default=0)
        self._budget.charge(len(text) + sum(widths) + (text.count("{") + text.count("%")) * largest)

    def _sum(self, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
        if attribute is not None:
            value = map(make_attrgetter(self, attribute), value)
        if not isinstance(start, int | float):
            raise TemplateError("the chat template sums something other than numbers")
        return sum(value, start)

    def _tojson(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON as Hugging Face's templates expect it: no HTML escapes, and any letter as itself."""
        self._budget.scan(value)
        if isinstance(indent, int):
            _check_widths("tojson", [indent * 100])
        text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
        if ensure_ascii:
            text = re.sub(r"[^\x00-\x7f]", self._escape, text)
        self._budget.charge(_size(text))
        return text

    def _escape(self, match: re.Match[str]) -> str:
        """A mark (see chat.py) must come through every filter as itself."""
        return match[0] if match[0] == getattr(self._local, "mark", None) else json.dumps(match[0])[1:-1]

    def keep(self, mark: str | None) -> None:
        """A character that `tojson(ensure_ascii=True)` leaves alone in what this thread renders next."""
        self._local.mark = mark


def _raise_exception(message: Any = "") -> None:
    raise TemplateError(str(message) or "the chat template refused these messages")
