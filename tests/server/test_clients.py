"""Other clients than OpenAI's own, doing what their users do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import instructor
import openai
import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

from tests.server.processes import served

MODEL = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def url(smollm2_path: Path) -> Iterator[str]:
    with served("-m", "headrace.cli", "serve", MODEL, "--port", "0", "--kv-memory", "400MiB") as (_, url):
        yield url


class City(BaseModel):
    """A city."""

    name: str = Field(max_length=30)
    population: int = Field(ge=0, le=100_000_000)
    is_capital: bool


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


@pytest.fixture(scope="module")
def model(url: str) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, base_url=url, api_key="none", temperature=0, max_tokens=60, max_retries=0)


def test_langchain_answers_and_streams(model: ChatOpenAI):
    messages = [
        SystemMessage("You are a helpful AI assistant."),
        HumanMessage("What is the capital of France? Answer in one sentence."),
    ]
    answer = model.invoke(messages)
    assert "Paris" in answer.content
    assert answer.usage_metadata["output_tokens"] > 1
    pieces = list(model.stream(messages))
    assert len(pieces) > 2
    assert "".join(piece.content for piece in pieces) == answer.content
    both = model.batch([messages, [HumanMessage("Say hello.")]])
    assert both[0].content == answer.content


def test_langchain_structured_output(model: ChatOpenAI):
    for method in ("json_schema", "function_calling"):
        city = model.with_structured_output(City, method=method).invoke("Describe Paris.")
        assert isinstance(city, City)


def test_langchain_tools(model: ChatOpenAI):
    question = HumanMessage("What is the weather in Paris?")
    answer = model.bind_tools([get_weather], tool_choice="get_weather").invoke([question])
    assert isinstance(answer, AIMessage)
    (call,) = answer.tool_calls
    assert call["name"] == "get_weather"
    assert set(call["args"]) == {"city"}
    result = ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])
    last = model.bind_tools([get_weather]).invoke([question, answer, result])
    assert last.content or last.tool_calls


def test_langchain_embeddings(url: str):
    # It would count tokens with a table of OpenAI's, fetched from the network.
    model = OpenAIEmbeddings(model=MODEL, base_url=url, api_key="none", check_embedding_ctx_length=False)
    texts = ["A cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose by half a point."]
    vectors = model.embed_documents(texts)
    near, far = (sum(a * b for a, b in zip(vectors[0], vectors[i], strict=True)) for i in (1, 2))
    assert near > far
    assert model.embed_query(texts[0]) == pytest.approx(vectors[0], abs=1e-3)


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA])
def test_instructor(url: str, mode: instructor.Mode):
    client = instructor.from_openai(openai.OpenAI(base_url=url, api_key="none", max_retries=0), mode=mode)
    city = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Describe Paris as a city."}],
        response_model=City,
        max_tokens=200,
        temperature=0.2,
        max_retries=0,
    )
    assert isinstance(city, City)
