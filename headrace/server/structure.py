"""What the replies to a call have to follow: `response_format`, `regex`, `grammar`, `choice`, forced tool calls, and a
budget for reasoning."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.core.grammar import Grammar
from headrace.core.request import Request
from headrace.server.errors import bad_request, show
from headrace.server.protocol import ChatRequest, Sampling
from headrace.text.grammar import constraint as constraints
from headrace.text.grammar.constraint import Constraint
from headrace.text.tools.hermes import HERMES
from headrace.text.tools.reasoning import Thinking
from headrace.text.tools.schema import ToolChoice, force

if TYPE_CHECKING:
    from headrace.server.build import Deployment


@dataclass(frozen=True, slots=True)
class ReplyRule:
    """Not compiled yet."""

    constraint: Constraint | None
    """Of the answer."""
    thinking: Thinking | None = None
    """Reasoning may come first."""
    is_thinking: bool = False
    """The prompt has begun it."""
    budget: int | None = None

    def of(self, request: Request, grammar: Grammar, deployment: Deployment) -> Request:
        """The request with its grammar. A reply that follows something ends where that ends, whatever `ignore_eos`
        says."""
        if self.constraint is None:
            return replace(request, grammar=grammar)
        stops = request.sampling.stop_token_ids | deployment.eos_ids
        return replace(request, grammar=grammar, sampling=replace(request.sampling, stop_token_ids=stops))

    def compile(self, deployment: Deployment) -> Grammar:
        """May take seconds. Raises `InvalidRequest` naming the field at fault."""
        grammars = deployment.grammars
        answer = None if self.constraint is None else grammars.compile(self.constraint)
        if self.thinking is None:
            assert answer is not None, "a rule has a constraint or a budget"
            return answer
        from headrace.text.grammar.reasoned import ReasonedGrammar  # noqa: PLC0415

        tokenizer = deployment.tokenizer
        return ReasonedGrammar(
            answer,
            close=tokenizer.encode(self.thinking.close, parse_special=True),
            vocabulary=grammars.vocabulary,
            open=None if self.is_thinking else tokenizer.id_of(self.thinking.open),
            budget=self.budget,
        )


def rule_of_chat(call: ChatRequest, choice: ToolChoice, deployment: Deployment, prompt: str) -> ReplyRule | None:
    """None where replies are free. Raises `ApiError` or `InvalidRequest`."""
    answer = _answer(call)
    if choice.mode == "required":
        answer = _calls(call, choice, deployment)
    elif choice.mode == "auto" and answer is not None:
        if answer.kind != "json_schema":
            raise bad_request(
                "invalid_value",
                f"{answer.param} and tools are set; with tools only response_format can say what a reply has to be, "
                'or set tool_choice to "none".',
                answer.param,
            )
        answer = _calls(call, choice, deployment, answer)
    thinking, budget = deployment.thinking, call.reasoning_budget
    if budget is not None and thinking is None:
        raise bad_request(
            "invalid_value", f"reasoning_budget is {budget}, and {deployment.name} does not reason.", "reasoning_budget"
        )
    if answer is None and budget is None:
        return None
    return ReplyRule(answer, thinking, thinking is not None and thinking.is_open_after(prompt), budget)


def _calls(
    call: ChatRequest, choice: ToolChoice, deployment: Deployment, answer: Constraint | None = None
) -> Constraint:
    """Calls of the tools, or the answer where one is given."""
    layout = (deployment.tool_format or HERMES).layout
    forced = force(replace(choice, mode="required"), layout, parallel=call.parallel_tool_calls is not False)
    assert forced is not None, "required"
    return constraints.calls(forced, deployment.tokenizer.control.ids, answer)


def rule_of_completion(call: Sampling) -> ReplyRule | None:
    """None where replies are free. Raises `ApiError` or `InvalidRequest`."""
    answer = _answer(call)
    return None if answer is None else ReplyRule(answer)


def _answer(call: Sampling) -> Constraint | None:
    ways: Mapping[str, Callable[[Any], Constraint | None]] = {
        "response_format": _of_format,
        "regex": lambda pattern: constraints.regex(pattern, "regex"),
        "grammar": lambda text: constraints.grammar(text, "grammar"),
        "choice": lambda texts: constraints.choice(texts, "choice"),
    }
    found = [way(value) for name, way in ways.items() if (value := getattr(call, name)) is not None]
    given = [each for each in found if each is not None]
    if len(given) > 1:
        names = " and ".join(each.param.partition(".")[0] for each in given)
        raise bad_request("invalid_value", f"{names} are set; a reply can follow one of them.", given[1].param)
    return given[0] if given else None


def _of_format(value: Any) -> Constraint | None:
    where = "response_format"
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "text":
        return None
    if kind == "json_object":
        return constraints.json_object(where)
    if kind != "json_schema":
        raise bad_request(
            "invalid_value",
            f'{where} is {show(value)}; its type must be "text", "json_object" or "json_schema".',
            where,
        )
    described = value.get("json_schema")
    if not isinstance(described, dict) or not isinstance(described.get("schema"), dict):
        raise bad_request(
            "invalid_value",
            f'{where}.json_schema is {show(described)}; {{"name": ..., "schema": {{...}}}} is needed.',
            f"{where}.json_schema",
        )
    return constraints.json_schema(described["schema"], f"{where}.json_schema")
