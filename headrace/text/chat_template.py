"""Chat templates: messages to the text a model was trained on."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2

from headrace.text.template_guard import Budget, GuardedEnvironment, TemplateError
from headrace.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "TemplateError"]

Message = Mapping[str, Any]

_MAX_SOURCE_CHARS = 1_000_000
_BYTES_PER_INPUT_BYTE = 32  # a template copies each message a few times; a long conversation earns a larger budget
_PROBE = "headraceprobe"


class ChatTemplate:
    """A compiled Jinja template, with what such templates expect to find (as in Hugging Face transformers).

    A template comes from a model file or an operator's flag, never from a request. It is still held to a time and to
    an amount of text (see template_guard.py). Safe to use from several threads. Rendering is Python at work and
    holds the GIL: some 60 us for a short chat, `time_limit_s` at worst; not for an event loop.
    """

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        time_limit_s: float = 2.0,
        max_bytes: int = 32 << 20,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`special_tokens`: variables such as bos_token and eos_token. `max_bytes`: of text and values made while
        rendering, on top of 32 times the messages. `now`: the clock behind `strftime_now`.

        Raises TemplateError for a template that does not compile.
        """
        if len(source) > _MAX_SOURCE_CHARS:
            raise TemplateError(f"the chat template has {len(source)} characters; at most {_MAX_SOURCE_CHARS} are read")
        self.source = source
        self.special_tokens = dict(special_tokens or {})
        self._time_limit_s = time_limit_s
        self._max_bytes = max_bytes
        self._environment = GuardedEnvironment(now)
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        except RecursionError as error:
            raise TemplateError("the chat template does not compile: it is nested too deeply") from error
        self.content_form = self._try_content()

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer, source: str | None = None, **options: Any) -> "ChatTemplate":
        """The model's own template, or `source` in its place, with the model's bos_token and eos_token.

        Raises TemplateError if there is neither: a guessed format would degrade the model without a word.
        """
        source = source or tokenizer.chat_template
        if source is None:
            raise TemplateError(
                "this model has no chat template, so it cannot take messages. Start the server with "
                "--chat-template FILE, or send a plain prompt to /v1/completions."
            )
        named = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        tokens = {name: "" if token is None else tokenizer.text_of(token) for name, token in named.items()}
        return cls(source, special_tokens=tokens, **options)

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text. `variables` are what the template knows beyond the usual (`enable_thinking`, ...).

        Raises TemplateError: the template's own message where it calls `raise_exception`, else what failed.
        """
        taken = sorted(variables.keys() & {*self.special_tokens, *_RESERVED})
        if taken:
            raise TemplateError(f"{', '.join(taken)} cannot be set for a chat template: it is set by the server")
        variables |= {
            **self.special_tokens,
            "messages": self.prepare(messages),
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._render(variables)

    def render_marked(self, variables: Mapping[str, Any], mark: str) -> str:
        """For chat.py: `render`'s arguments as a mapping, with `mark` in their texts, which no filter may lose."""
        self._environment.keep(mark)
        try:
            return self.render(**variables)
        finally:
            self._environment.keep(None)

    def prepare(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Content in the form this template can read.

        Content is a string or a list of `{"type": "text", "text": ...}`. Templates that know only strings get the
        parts joined by a newline; those that know only lists get a list of one part. Raises TemplateError for parts
        of another type.
        """
        return [self._prepare(message) for message in messages]

    def _prepare(self, message: Message) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, str):
            if self.content_form == "parts":
                content = [{"type": "text", "text": content}]
        elif content is not None:
            if not isinstance(content, Sequence):
                raise TemplateError(f"message content is a {type(content).__name__}, not text or a list of parts")
            parts = [_text_part(part) for part in content]
            content = "\n".join(parts) if self.content_form == "text" else [{"type": "text", "text": t} for t in parts]
        return {**message, "content": content} if "content" in message else dict(message)

    def _try_content(self) -> str:
        """What the template reads: "text", "parts" or "both". Found by trying, as templates do not say."""
        as_text = self._probe(_PROBE)
        as_parts = self._probe([{"type": "text", "text": _PROBE}])
        # A template that knows only strings fails on a list, or prints it as Python writes it.
        reads_parts = _PROBE in as_parts and "'type'" not in as_parts and '"type"' not in as_parts
        if _PROBE in as_text:
            return "both" if reads_parts else "text"
        return "parts" if reads_parts else "text"

    def _probe(self, content: Any) -> str:
        message = {"role": "user", "content": content}
        try:
            return self._render({**self.special_tokens, "messages": [message], "add_generation_prompt": False})
        except TemplateError:
            return ""

    def _render(self, variables: Mapping[str, Any]) -> str:
        try:
            size = len(json.dumps(variables, ensure_ascii=False, default=str))
        except (TypeError, ValueError, RecursionError) as error:
            raise TemplateError(f"the messages cannot be written as JSON: {error}") from error
        self._environment.use(Budget(self._time_limit_s, self._max_bytes + _BYTES_PER_INPUT_BYTE * size))
        try:
            return self._template.render(variables)
        except TemplateError:
            raise
        except RecursionError as error:
            raise TemplateError("the chat template calls itself too deeply") from error
        except Exception as error:  # a template is a program: it can fail in any way
            raise TemplateError(f"the chat template failed: {type(error).__name__}: {error}") from error


_RESERVED = ("messages", "tools", "add_generation_prompt")


def _text_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise TemplateError(f"message content has a part of type {kind!r}; this server reads parts of type 'text' only")
    return part["text"]
