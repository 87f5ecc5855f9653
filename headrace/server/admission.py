"""From a parsed call to frozen requests: names, caps, templates, token ids, room in the context.

Everything here may take as long as the prompt is long and runs in the text pool, neither on the event loop nor on the
engine's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.core.randomness import draw_seed
from headrace.core.request import Pooling, Request
from headrace.core.sampling import SamplingParams
from headrace.server.errors import ApiError, bad_request, show
from headrace.server.generation import ParserOfReplies, TextOptions
from headrace.server.limits import CallLimits
from headrace.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    Message,
    RenderRequest,
    Sampling,
    TokenizeRequest,
    message_content,
)
from headrace.server.ranking import Ranking
from headrace.server.structure import ReplyRule, rule_of_chat, rule_of_completion
from headrace.text.breakers import DEFAULT_BREAKERS, tokens_containing
from headrace.text.chat import ChatPrompt, encode_chat
from headrace.text.chat_template import TemplateError
from headrace.text.tools.base import ReplyParser, ToolParser
from headrace.text.tools.hermes import HERMES
from headrace.text.tools.reasoning import ReasoningParser
from headrace.text.tools.schema import Tool, ToolChoice, parse_choice, parse_tools, template_calls
from headrace.text.tools.untaught import with_tools_told

if TYPE_CHECKING:
    from headrace.server.build import Deployment


LEAST_TOP_P = 1e-9


@dataclass(frozen=True, slots=True)
class Job:
    """One API call as the engine sees it. Reply `i * num_choices + k` is choice k of request i."""

    requests: tuple[Request, ...]
    text: tuple[TextOptions, ...]
    """Parallel to `requests`."""
    num_choices: int
    rule: ReplyRule | None = None
    """What all replies have to follow, to be compiled."""
    only_echo: bool = False
    """The reply is the prompt itself: nothing is computed."""
    num_prompt_top: int | None = None
    """The prompts' logprobs are part of the reply, with those of so many most probable tokens."""
    timings: bool = False
    """How long things took is part of the reply."""

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests)


def check_model(name: str | None, served: Sequence[str]) -> None:
    """Raises `ApiError` (404) unless `name` is one of `served`; no name means the one model there is."""
    if name is not None and name not in served:
        names = " or ".join(repr(s) for s in served)
        raise ApiError(
            404, "model_not_found", f"The model {show(name)} is not served here; ask for {names}.", param="model"
        )


def prepare_chat(
    call: ChatRequest, call_id: str, deployment: Deployment, limits: CallLimits, tenant: str, *, arrival_s: float
) -> Job:
    """Raises `ApiError` or `RequestError` for whatever the client has to change."""
    num_choices = _num_choices(call, limits)
    if call.top_logprobs and not call.logprobs:
        raise bad_request("invalid_value", "top_logprobs is only allowed with logprobs: true.", "top_logprobs")
    num_logprobs = _num_logprobs(call.top_logprobs or 0, "top_logprobs", limits) if call.logprobs else None
    limit, limit_name = limit_of(call)
    options = TextOptions(_stops(call, limits), call.min_tokens or 0, num_logprobs is not None)
    sampling = _sampling(call, limit, num_logprobs, deployment, limits, limit_name=limit_name)
    tools = parse_tools(call.tools)
    choice = parse_choice(call.tool_choice, tools)
    prompt = encode_messages(call.messages, deployment, choice.tools)
    options = replace(options, parser=_parser_of(choice, deployment, prompt.text))
    num_prompt_top = _num_prompt_top(call, limits)
    request = Request(
        call_id,
        tuple(prompt.ids),
        sampling,
        num_choices,
        score_prompt=num_prompt_top is not None,
        num_prompt_top=num_prompt_top,
        **_service(call, tenant, arrival_s),
    )
    return Job(
        (request,),
        (options,),
        num_choices,
        rule=rule_of_chat(call, choice, deployment, prompt.text),
        num_prompt_top=num_prompt_top,
        timings=bool(call.timings),
    )


def _parser_of(choice: ToolChoice, deployment: Deployment, prompt: str) -> ParserOfReplies | None:
    """None where a reply is nothing but its text."""
    format = None if choice.mode == "none" else deployment.tool_format or HERMES
    thinking = deployment.thinking
    if format is None and thinking is None:
        return None

    def make() -> ReplyParser:
        calls = None if format is None else ToolParser(format, choice.tools)
        if thinking is None:
            assert calls is not None
            return calls
        return ReasoningParser(thinking, calls, is_open=thinking.is_open_after(prompt))

    markers = (*(format.markers if format else ()), *((thinking.open, thinking.close) if thinking else ()))
    control = deployment.tokenizer.control.ids
    return ParserOfReplies(make, frozenset(control[text] for text in markers if text in control))


def limit_of(call: ChatRequest) -> tuple[int | None, str]:
    """The most tokens a chat asks for, and the name it used for them: the smaller one counts."""
    newer, older = call.max_completion_tokens, call.max_tokens
    if newer is not None and (older is None or newer <= older):
        return newer, "max_completion_tokens"
    return older, "max_tokens"


def ranking_of(call: CompletionRequest) -> Ranking | None:
    """None where every choice that is computed is returned. Its numbers are judged in `prepare_completion`."""
    n = 1 if call.n is None else call.n
    return None if call.best_of is None or call.best_of == n else Ranking(call.best_of, n)


def prepare_completion(
    call: CompletionRequest, call_id: str, deployment: Deployment, limits: CallLimits, tenant: str, *, arrival_s: float
) -> Job:
    """Raises `ApiError` or `RequestError` for whatever the client has to change."""
    num_choices = _num_choices(call, limits)
    ranking = ranking_of(call)
    if ranking is not None:
        _check_ranking(ranking, bool(call.stream), limits)
        num_choices = ranking.num_candidates
    if len(call.prompt) > limits.max_prompts:
        raise bad_request(
            "invalid_value",
            f"prompt is a list of {len(call.prompt)} prompts; one call may bring at most {limits.max_prompts}.",
            "prompt",
        )
    num_logprobs = None if call.logprobs is None else _num_logprobs(call.logprobs, "logprobs", limits)
    echo = bool(call.echo)
    is_scored = echo and num_logprobs is not None
    num_prompt_top = _num_prompt_top(call, limits)
    stops = _stops(call, limits)
    sampling = _sampling(call, call.max_tokens, num_logprobs, deployment, limits)
    if call.max_tokens == 0 and echo and num_choices > 1:
        name = "n" if ranking is None else "best_of"
        raise bad_request(
            "invalid_value", f"{name} is {num_choices}; with max_tokens 0 all choices are the prompt.", name
        )
    if ranking is not None and num_logprobs is None:
        sampling = replace(sampling, num_logprobs=0)
    requests, options = [], []
    for i, text in enumerate(call.prompt):
        prompt, has_bos = _prompt_ids(text, call.add_special_tokens is not False, deployment)
        if call.suffix:
            prompt = _with_gap(prompt, has_bos, call.suffix, echo, deployment)
        shown = None
        if echo:
            shown = text if isinstance(text, str) else deployment.tokenizer.decode(prompt)
        options.append(
            TextOptions(
                stops,
                sampling.min_tokens,
                sampling.num_logprobs is not None,
                ranked=ranking is not None,
                echo=shown,
                has_bos=has_bos,
            )
        )
        requests.append(
            Request(
                f"{call_id}-{i}" if len(call.prompt) > 1 else call_id,
                prompt,
                # A given seed is every prompt's, so that a reply is the same alone and in a list.
                sampling if call.seed is not None else replace(sampling, seed=draw_seed()),
                num_choices,
                score_prompt=is_scored or num_prompt_top is not None,
                num_prompt_top=None if num_prompt_top is None else max(num_prompt_top, num_logprobs or 0),
                **_service(call, tenant, arrival_s),
            )
        )
    only_echo = echo and call.max_tokens == 0 and num_logprobs is None and num_prompt_top is None
    return Job(
        tuple(requests),
        tuple(options),
        num_choices,
        rule=rule_of_completion(call),
        only_echo=only_echo,
        num_prompt_top=num_prompt_top,
        timings=bool(call.timings),
    )


def check_inputs(call: EmbeddingRequest, limits: CallLimits) -> None:
    """Ahead of the queue, which would refuse so many as if it were only full now. Raises `ApiError` (400)."""
    if len(call.input) > limits.max_inputs:
        raise bad_request(
            "invalid_value",
            f"input is a list of {len(call.input)} texts; one call may bring at most {limits.max_inputs}.",
            "input",
        )


def prepare_embedding(
    call: EmbeddingRequest, call_id: str, deployment: Deployment, tenant: str, *, arrival_s: float
) -> Job:
    """One request per input. Raises `ApiError` or `RequestError` for whatever the client has to change."""
    if call.dimensions is not None and call.dimensions > deployment.hidden_size:
        raise bad_request(
            "invalid_value",
            f"dimensions is {call.dimensions}; this model's embeddings have {deployment.hidden_size}.",
            "dimensions",
        )
    sampling = SamplingParams(max_tokens=0, temperature=0.0)
    requests = []
    for i, text in enumerate(call.input):
        prompt, _ = _prompt_ids(text, call.add_special_tokens is not False, deployment, "input")
        requests.append(
            Request(
                f"{call_id}-{i}",
                prompt,
                sampling,
                pooling=Pooling(call.pooling or "mean"),
                **_service(call, tenant, arrival_s),
            )
        )
    return Job(tuple(requests), (TextOptions(),) * len(requests), 1)


def tokenize(call: TokenizeRequest, deployment: Deployment) -> tuple[int, ...]:
    """Raises `ApiError` (400) unless the call has either a prompt or messages."""
    if (call.prompt is None) == (call.messages is None):
        raise bad_request("invalid_value", "Give either prompt or messages, and not both.", "prompt")
    if call.messages is not None:
        return tuple(encode_messages(call.messages, deployment).ids)
    assert call.prompt is not None, "checked above"
    _check_size(call.prompt, "prompt", deployment)
    return tuple(
        deployment.tokenizer.encode(
            call.prompt, add_special_tokens=call.add_special_tokens is not False, parse_special=True
        )
    )


def detokenize(call: DetokenizeRequest, deployment: Deployment) -> str:
    """Raises `ApiError` (400) for an id outside the vocabulary."""
    check_ids(call.tokens, deployment.tokenizer.vocab_size, "tokens")
    return deployment.tokenizer.decode(call.tokens)


def render(call: RenderRequest, deployment: Deployment) -> str:
    """The text that the chat template makes of a conversation. Raises as `encode_messages`."""
    return encode_messages(call.messages, deployment, parse_tools(call.tools)).text


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises `ApiError` (400) for the first id outside the vocabulary."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    token = next(token for token in ids if not 0 <= token < vocab_size)
    raise bad_request("invalid_value", f"{param} has the token id {show(token)}; ids are 0 to {vocab_size - 1}.", param)


def encode_messages(messages: Sequence[Message], deployment: Deployment, tools: Sequence[Tool] = ()) -> ChatPrompt:
    """A chat as the model reads it, the reply's opening included; what messages say never becomes a control token."""
    if not messages:
        raise bad_request("invalid_value", "messages is empty; at least one message is needed.", "messages")
    if deployment.template is None:
        raise bad_request(
            "no_chat_template",
            f"{deployment.name} has no chat template, so it cannot read messages; use /v1/completions, or start the "
            "server with --chat-template FILE.",
            "messages",
        )
    plain = _for_template(messages)
    definitions = [tool.definition() for tool in tools]
    _check_size([*plain, *definitions], "messages", deployment)
    if deployment.tool_format is None and (tools or any(m["role"] == "tool" or "tool_calls" in m for m in plain)):
        plain, definitions = with_tools_told(plain, tools), []
    try:
        prompt = encode_chat(deployment.tokenizer, deployment.template, plain, tools=definitions or None)
    except TemplateError as error:
        raise bad_request(
            "template_error", f"The model's chat template refuses these messages: {error}", "messages"
        ) from error
    check_encoded(prompt.ids, deployment, "messages")
    return prompt


def _for_template(messages: Sequence[Message]) -> list[dict[str, Any]]:
    plain: list[dict[str, Any]] = []
    called: dict[str, str] = {}  # id of a call -> its function
    for i, message in enumerate(messages):
        where = f"messages[{i}]."
        # OpenAI's newer name for the same part; templates know only the older one.
        role = "system" if message.role == "developer" else message.role
        entry: dict[str, Any] = {"role": role, "content": message_content(message, where)}
        if message.name:
            entry["name"] = message.name
        if message.tool_calls:
            _only_for("assistant", message, "tool_calls", where)
            entry["tool_calls"] = template_calls(message.tool_calls, f"{where}tool_calls")
            called |= {call["id"]: call["function"]["name"] for call in entry["tool_calls"]}
        if message.reasoning_content:
            _only_for("assistant", message, "reasoning_content", where)
            entry["reasoning_content"] = message.reasoning_content
        if message.role == "tool" or message.tool_call_id is not None:
            _only_for("tool", message, "tool_call_id", where)
            if message.tool_call_id not in called:
                raise bad_request(
                    "invalid_value",
                    f"{where}tool_call_id is {show(message.tool_call_id)}, which no call before it has.",
                    f"{where}tool_call_id",
                )
            entry |= {"tool_call_id": message.tool_call_id, "name": called[message.tool_call_id]}
        plain.append(entry)
    return plain


def _only_for(role: str, message: Message, field: str, where: str) -> None:
    if message.role != role:
        raise bad_request(
            "invalid_value",
            f"{where}{field} is set, and the role is {message.role!r}; only {role!r} has it.",
            where + field,
        )


def _prompt_ids(
    text: str | tuple[int, ...], add_special: bool, deployment: Deployment, param: str = "prompt"
) -> tuple[tuple[int, ...], bool]:
    """(ids, whether the first is a BOS that the text does not show)."""
    tokenizer = deployment.tokenizer
    if not isinstance(text, str):
        check_ids(text, deployment.vocab_size, param)
        return text, False
    _check_size(text, param, deployment)
    ids = tuple(tokenizer.encode(text, add_special_tokens=add_special, parse_special=True))
    if not ids:
        raise bad_request(
            "invalid_value",
            f"{param} is empty, and this model has no token to begin a text with; give it some text.",
            param,
        )
    check_encoded(ids, deployment, param)
    return ids, add_special and ids[0] == tokenizer.bos_id


def _with_gap(
    prompt: tuple[int, ...], has_bos: bool, suffix: str, echo: bool, deployment: Deployment
) -> tuple[int, ...]:
    """The ids of a prompt that the reply leads over to `suffix`."""
    fill_in = deployment.tokenizer.fill_in
    if fill_in is None:
        raise bad_request(
            "unsupported_parameter",
            f"suffix is {show(suffix)}, and {deployment.name} has no fill-in tokens: it cannot write what stands "
            "before a given text. Leave suffix out.",
            "suffix",
        )
    if echo:
        raise bad_request("invalid_value", "suffix and echo exclude each other: leave one of them out.", "suffix")
    _check_size(suffix, "suffix", deployment)
    after = deployment.tokenizer.encode(suffix, parse_special=True)
    check_encoded(after, deployment, "suffix")
    begin = int(has_bos)
    return (*prompt[:begin], *fill_in.arrange(prompt[begin:], after))


def check_encoded(ids: Sequence[int], deployment: Deployment, param: str) -> None:
    """Raises `ApiError` (400) for a token that the text has and the model has not (Gemma's image token, say)."""
    if max(ids, default=0) >= deployment.vocab_size:
        token = next(token for token in ids if token >= deployment.vocab_size)
        raise bad_request(
            "invalid_value",
            f"{param} has the token {show(deployment.tokenizer.text_of(token))} (id {token}), which this model was not "
            f"made to read: its ids end at {deployment.vocab_size - 1}. Leave it out.",
            param,
        )


def _check_size(value: object, param: str, deployment: Deployment) -> None:
    """Refuse what cannot fit whatever its tokens are, before anything as long as it is rendered or encoded.

    A token covers at most the bytes of the longest one, so at most as many characters.
    """
    num_chars = _num_chars(value)
    most = deployment.context_length * deployment.tokenizer.max_token_bytes
    if num_chars > most:
        raise bad_request(
            "context_length_exceeded",
            f"this model reads at most {deployment.context_length} tokens, which no {param} of {num_chars} characters "
            f"can be (at most {most}). Shorten it.",
            param,
        )


def _num_chars(value: object) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_num_chars, value.values()))
    return sum(map(_num_chars, value)) if isinstance(value, list) else 0


def _service(call: Sampling | EmbeddingRequest, tenant: str, arrival_s: float) -> dict[str, Any]:
    """The fields of a call's requests that say how the engine is to serve them."""
    salt = call.cache_salt if isinstance(call, Sampling) else None
    return {
        "tenant": tenant,
        "priority": call.priority or 0,
        "is_batch": call.service_tier == "flex",
        "deadline_s": None if call.deadline_ms is None else arrival_s + call.deadline_ms / 1e3,
        # A tenant's name has no slash: no two tenants can come to the same salt, whatever they write.
        "cache_salt": tenant if salt is None else f"{tenant}/{salt}",
    }


def _num_choices(call: Sampling, limits: CallLimits) -> int:
    n = 1 if call.n is None else call.n
    if not 1 <= n <= limits.max_choices:
        raise bad_request("invalid_value", f"n is {n}; it must be between 1 and {limits.max_choices}.", "n")
    return n


def _check_ranking(ranking: Ranking, stream: bool, limits: CallLimits) -> None:
    best_of, n = ranking.num_candidates, ranking.num_kept
    if not n < best_of <= limits.max_choices:
        raise bad_request(
            "invalid_value",
            f"best_of is {best_of} and n is {n}; best_of must be between n and {limits.max_choices}.",
            "best_of",
        )
    if stream:
        raise bad_request(
            "invalid_value",
            f"best_of is {best_of}; which choices are best is known at the end only: leave out stream or best_of.",
            "best_of",
        )


def _num_logprobs(count: int, name: str, limits: CallLimits) -> int:
    if count > limits.max_logprobs:
        raise bad_request("invalid_value", f"{name} is {count}; it must be at most {limits.max_logprobs}.", name)
    return count


def _num_prompt_top(call: Sampling, limits: CallLimits) -> int | None:
    if call.prompt_logprobs is None:
        return None
    if call.stream:
        raise bad_request(
            "invalid_value", "prompt_logprobs come with a whole reply only: leave out stream.", "prompt_logprobs"
        )
    return _num_logprobs(call.prompt_logprobs, "prompt_logprobs", limits)


def _stops(call: Sampling, limits: CallLimits) -> tuple[str, ...]:
    stops = call.stop or ()
    if len(stops) > limits.max_stops:
        raise bad_request(
            "invalid_value", f"stop has {len(stops)} strings; at most {limits.max_stops} are allowed.", "stop"
        )
    for stop in stops:
        if not 1 <= len(stop) <= limits.max_stop_chars:
            raise bad_request(
                "invalid_value",
                f"stop has a string of {len(stop)} characters; each must have 1 to {limits.max_stop_chars}.",
                "stop",
            )
    return stops


def _dry_breakers(call: Sampling, deployment: Deployment, limits: CallLimits) -> frozenset[int] | None:
    """None where there is no repeat to break."""
    strings = DEFAULT_BREAKERS if call.dry_sequence_breakers is None else call.dry_sequence_breakers
    if len(strings) > limits.max_stops:
        raise bad_request(
            "invalid_value",
            f"dry_sequence_breakers has {len(strings)} strings; at most {limits.max_stops} are allowed.",
            "dry_sequence_breakers",
        )
    for string in strings:
        if not 1 <= len(string) <= limits.max_stop_chars:
            raise bad_request(
                "invalid_value",
                f"dry_sequence_breakers has a string of {len(string)} characters; each must have 1 to "
                f"{limits.max_stop_chars}.",
                "dry_sequence_breakers",
            )
    return tokens_containing(deployment.tokenizer, strings) if call.dry_multiplier else None


def _sampling(
    call: Sampling,
    max_tokens: int | None,
    num_logprobs: int | None,
    deployment: Deployment,
    limits: CallLimits,
    *,
    limit_name: str = "max_tokens",
) -> SamplingParams:
    vocab_size = deployment.vocab_size
    bias = call.logit_bias or ()
    if len(bias) > limits.max_logit_bias:
        raise bad_request(
            "invalid_value",
            f"logit_bias has {len(bias)} entries; at most {limits.max_logit_bias} are allowed.",
            "logit_bias",
        )
    check_ids([token for token, _ in bias], vocab_size, "logit_bias")
    stop_ids = frozenset(call.stop_token_ids or ())
    check_ids(tuple(stop_ids), vocab_size, "stop_token_ids")
    if not call.ignore_eos:
        stop_ids |= deployment.eos_ids

    if max_tokens is not None and call.min_tokens is not None and call.min_tokens > max_tokens:
        raise bad_request(
            "invalid_value",
            f"min_tokens is {call.min_tokens}, more than the {max_tokens} of {limit_name}.",
            "min_tokens",
        )
    given: dict[str, Any] = {
        "temperature": call.temperature,
        "top_p": LEAST_TOP_P if call.top_p == 0 else call.top_p,  # zero is OpenAI's for the most probable token
        "min_p": call.min_p,
        "presence_penalty": call.presence_penalty,
        "frequency_penalty": call.frequency_penalty,
        "repetition_penalty": call.repetition_penalty,
        "typical_p": call.typical_p,
        "xtc_probability": call.xtc_probability,
        "xtc_threshold": call.xtc_threshold,
        "dry_multiplier": call.dry_multiplier,
        "dry_base": call.dry_base,
        "dry_allowed_length": call.dry_allowed_length,
        "dry_range": call.dry_range,
        "dry_breakers": _dry_breakers(call, deployment, limits),
    }
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=call.min_tokens or 0,
        top_k=max(call.top_k or 0, 0),
        logit_bias=tuple(dict(bias).items()),
        seed=draw_seed() if call.seed is None else call.seed,
        stop_token_ids=stop_ids,
        num_logprobs=num_logprobs,
        **{name: value for name, value in given.items() if value is not None},
    )
