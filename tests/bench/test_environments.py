"""A peer that was compiled for something else is not trusted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers import environments
from benchmarks.peers.environments import Recipe, Run, Say, ensure

RECIPE = Recipe("peer", "1.0", (), "peer", cmake_options=("-DX=ON",), is_native=True)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Recipe]:
    """The recipes that were made, in a cache of its own: nothing is installed."""
    made: list[Recipe] = []

    def install(recipe: Recipe, folder: Path, run: Run, say: Say) -> None:
        (folder / "of").write_text(recipe.name)
        made.append(recipe)

    monkeypatch.setattr(environments, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(environments, "_install", install)
    monkeypatch.setattr(environments, "_versions", lambda folder: {"peer": "1.0"})
    return made


def test_what_is_there_is_taken(made: list[Recipe]) -> None:
    first = ensure(RECIPE, print)
    assert ensure(RECIPE, print) == first
    assert made == [RECIPE]


def test_other_options_are_compiled_anew(made: list[Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    ensure(RECIPE, print)
    for other in (replace(RECIPE, cmake_options=("-DX=OFF",)), replace(RECIPE, environment=(("CMAKE_ARGS", "-DY"),))):
        ensure(other, print)
        assert made[-1] == other
        assert "anew" in capsys.readouterr().out


def test_another_processor_compiles_anew(made: list[Recipe], monkeypatch: pytest.MonkeyPatch) -> None:
    ensure(RECIPE, print)
    wheel = replace(RECIPE, name="wheel", is_native=False)
    ensure(wheel, print)
    monkeypatch.setattr(environments, "hardware", lambda: "another processor")
    ensure(wheel, print)
    ensure(RECIPE, print)
    assert made == [RECIPE, wheel, RECIPE]


def test_a_record_of_an_older_version_counts_for_nothing(made: list[Recipe], tmp_path: Path) -> None:
    folder = ensure(RECIPE, print).folder
    (folder / "installed.json").write_text(json.dumps({"versions": {}, "install_s": 1, "hardware": "?"}))
    (folder / "left over").touch()
    ensure(RECIPE, print)
    assert len(made) == 2
    assert not (folder / "left over").exists()
