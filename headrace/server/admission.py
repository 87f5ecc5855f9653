"""From a parsed call to frozen requests: names, caps, templates, token ids, room in the context.

Everything here may take as long as the prompt is long and runs in the text pool, neither on the event loop nor on the
engine's thread.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from headrace.core.request import Request
from headrace.core.sampling import SamplingParams
from headrace.server.errors import ApiError, bad_request, show
from headrace.server.generation import TextOptions
from headrace.server.limits import Limits
from headrace.server.protocol import ChatRequest, CompletionRequest, Message, Sampling, TokenizeRequest, message_content
from headrace.text.chat import encode_chat
from headrace.text.chat_template import TemplateError

if TYPE_CHECKING:
    from headrace.server.build import Deployment


@dataclass(frozen=True, slots=True)
class Job:
    """One API call as the engine sees it. Reply `i * num_choices + k` is choice k of request i."""

    requests: tuple[Request, ...]
    text: tuple[TextOptions, ...]
    """Parallel to `requests`."""
    num_choices: int

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


def prepare_chat(call: ChatRequest, call_id: str, deployment: Deployment, limits: Limits, tenant: str) -> Job:
    """Raises `ApiError` or `RequestError` for whatever the client has to change."""
    num_choices = _num_choices(call, limits)
    if call.top_logprobs is not None and not call.logprobs:
        raise bad_request("invalid_value", "top_logprobs is only allowed with logprobs: true.", "top_logprobs")
    num_logprobs = _num_logprobs(call.top_logprobs or 0, "top_logprobs", limits) if call.logprobs else None
    limit = min((n for n in (call.max_tokens, call.max_completion_tokens) if n is not None), default=None)
    options = TextOptions(_stops(call, limits), call.min_tokens or 0, num_logprobs is not None)
    sampling = _sampling(call, limit, num_logprobs, deployment, limits)
    prompt = encode_messages(call.messages, deployment)
    request = Request(call_id, prompt, sampling, num_choices, tenant=tenant, cache_salt=tenant)
    return Job((request,), (options,), num_choices)


def prepare_completion(
    call: CompletionRequest, call_id: str, deployment: Deployment, limits: Limits, tenant: str
) -> Job:
    """Raises `ApiError` or `RequestError` for whatever the client has to change."""
    num_choices = _num_choices(call, limits)
    if len(call.prompt) > limits.max_prompts:
        raise bad_request(
            "invalid_value",
            f"prompt is a list of {len(call.prompt)} prompts; one call may bring at most {limits.max_prompts}.",
            "prompt",
        )
    num_logprobs = None if call.logprobs is None else _num_logprobs(call.logprobs, "logprobs", limits)
    echo = bool(call.echo)
    stops = _stops(call, limits)
    sampling = _sampling(call, call.max_tokens, num_logprobs, deployment, limits)
    requests, options = [], []
    for i, text in enumerate(call.prompt):
        prompt, has_bos = _prompt_ids(text, call.add_special_tokens is not False, deployment)
        shown = None
        if echo:
            shown = text if isinstance(text, str) else deployment.tokenizer.decode(prompt)
        options.append(TextOptions(stops, sampling.min_tokens, num_logprobs is not None, shown, has_bos))
        requests.append(
            Request(
                f"{call_id}-{i}" if len(call.prompt) > 1 else call_id,
                prompt,
                # A given seed is every prompt's, so that a reply is the same alone and in a list.
                sampling if call.seed is not None else replace(sampling, seed=draw_seed()),
                num_choices,
                score_prompt=echo and num_logprobs is not None,
                tenant=tenant,
                cache_salt=tenant,
            )
        )
    return Job(tuple(requests), tuple(options), num_choices)


def tokenize(call: TokenizeRequest, deployment: Deployment) -> tuple[int, ...]:
    """Raises `ApiError` (400) unless the call has either a prompt or messages."""
    if (call.prompt is None) == (call.messages is None):
        raise bad_request("invalid_value", "Give either prompt or messages, and not both.", "prompt")
    if call.messages is not None:
        return encode_messages(call.messages, deployment)
    assert call.prompt is not None, "checked above"
    return tuple(
        deployment.tokenizer.encode(
            call.prompt, add_special_tokens=call.add_special_tokens is not False, parse_special=True
        )
    )


def check_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raises `ApiError` (400) for the first id outside the vocabulary."""
    for token in ids:
        if not 0 <= token < vocab_size:
            raise bad_request(
                "invalid_value", f"{param} has the token id {show(token)}; ids are 0 to {vocab_size - 1}.", param
            )


def encode_messages(messages: Sequence[Message], deployment: Deployment) -> tuple[int, ...]:
    """Token ids of a chat, the reply's opening included; what the messages say never becomes a control token."""
    if not messages:
        raise bad_request("invalid_value", "messages is empty; at least one message is needed.", "messages")
    if deployment.template is None:
        raise bad_request(
            "no_chat_template",
            f"{deployment.name} has no chat template, so it cannot read messages; use /v1/completions, or start the "
            "server with --chat-template FILE.",
            "messages",
        )
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        # OpenAI's newer name for the same part; templates know only the older one.
        role = "system" if message.role == "developer" else message.role
        plain.append({"role": role, "content": message_content(message, f"messages[{i}].")})
        if message.name:
            plain[-1]["name"] = message.name
    try:
        return tuple(encode_chat(deployment.tokenizer, deployment.template, plain).ids)
    except TemplateError as error:
        raise bad_request(
            "template_error", f"The model's chat template refuses these messages: {error}", "messages"
        ) from error


def draw_seed() -> int:
    """A seed for a request that brought none: from here on its randomness is fixed."""
    return secrets.randbits(63)


def _prompt_ids(text: str | tuple[int, ...], add_special: bool, deployment: Deployment) -> tuple[tuple[int, ...], bool]:
    """(ids, whether the first is a BOS that the text does not show)."""
    tokenizer = deployment.tokenizer
    if not isinstance(text, str):
        check_ids(text, tokenizer.vocab_size, "prompt")
        return text, False
    ids = tuple(tokenizer.encode(text, add_special_tokens=add_special, parse_special=True))
    if not ids:
        raise bad_request(
            "invalid_value",
            "prompt is empty, and this model has no token to begin a text with; give it some text.",
            "prompt",
        )
    return ids, add_special and ids[0] == tokenizer.bos_id


def _num_choices(call: Sampling, limits: Limits) -> int:
    n = 1 if call.n is None else call.n
    most = min(limits.max_choices, limits.max_running)
    if not 1 <= n <= most:
        raise bad_request("invalid_value", f"n is {n}; it must be between 1 and {most}.", "n")
    return n


def _num_logprobs(count: int, name: str, limits: Limits) -> int:
    if count > limits.max_logprobs:
        raise bad_request("invalid_value", f"{name} is {count}; it must be at most {limits.max_logprobs}.", name)
    return count


def _stops(call: Sampling, limits: Limits) -> tuple[str, ...]:
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


def _sampling(
    call: Sampling, max_tokens: int | None, num_logprobs: int | None, deployment: Deployment, limits: Limits
) -> SamplingParams:
    tokenizer = deployment.tokenizer
    bias = call.logit_bias or ()
    if len(bias) > limits.max_logit_bias:
        raise bad_request(
            "invalid_value",
            f"logit_bias has {len(bias)} entries; at most {limits.max_logit_bias} are allowed.",
            "logit_bias",
        )
    check_ids([token for token, _ in bias], tokenizer.vocab_size, "logit_bias")
    stop_ids = frozenset(call.stop_token_ids or ())
    check_ids(tuple(stop_ids), tokenizer.vocab_size, "stop_token_ids")
    if not call.ignore_eos:
        stop_ids |= frozenset(tokenizer.eos_ids)

    if max_tokens is not None and call.min_tokens is not None and call.min_tokens > max_tokens:
        raise bad_request(
            "invalid_value", f"min_tokens is {call.min_tokens}, more than the {max_tokens} of max_tokens.", "min_tokens"
        )
    given = {
        "temperature": call.temperature,
        "top_p": call.top_p,
        "min_p": call.min_p,
        "presence_penalty": call.presence_penalty,
        "frequency_penalty": call.frequency_penalty,
        "repetition_penalty": call.repetition_penalty,
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
