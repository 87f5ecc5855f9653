"""What every reader of checkpoint files is made of: a mapped file, a stored tensor, and the error for a
broken file.

Files are untrusted. A reader checks each count, length and offset against the real size of the file before it
uses it, so a bad file costs an error and never memory.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.core.errors import HeadraceError
from headrace.models.quantization.decode import dequantize
from headrace.models.quantization.formats import Format

MAX_DIMS = 8  # safetensors sets no bound; GGUF allows 4


class CheckpointError(HeadraceError, ValueError):
    """A model file or folder cannot be read: says what is wrong, the value found and what to do."""


@dataclass(frozen=True, slots=True, eq=False)
class MappedFile:
    """A file mapped read-only. The mapping lives as long as an array made from it.

    Replacing the file (a rename over it) is harmless; truncating it while it is mapped kills the process with
    SIGBUS, as it does for every program that maps files.
    """

    path: Path
    buffer: mmap.mmap = field(repr=False)
    header_bytes: int = 0  # [0, header_bytes) describes the tensors, the rest is their data

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Map `path`. Raises CheckpointError when it is missing, empty or unreadable."""
        try:
            with path.open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    raise CheckpointError(f"{path} is empty: fetch it again")
                return cls(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from error

    @property
    def num_bytes(self) -> int:
        return len(self.buffer)

    def forget_pages(self) -> None:
        """Let the process's memory of the file go: read again, pages come back from the system's cache."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.buffer.madvise(mmap.MADV_DONTNEED)

    def window(self, start: int, num_bytes: int) -> NDArray[np.uint8]:
        """Bytes [start, start + num_bytes), read-only, not copied. The caller has checked the bounds."""
        return np.frombuffer(self.buffer, np.uint8, num_bytes, start)


@dataclass(frozen=True, slots=True, eq=False)
class StoredTensor:
    """A tensor as the file holds it.

    shape  in NumPy order, slowest first: a linear layer is [out, in]
    data   uint8 [*shape[:-1], bytes per row], mapped, read-only: `data[i]` is row i in its storage format
    """

    name: str
    shape: tuple[int, ...]
    format: Format
    data: NDArray[np.uint8] = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return int(self.data.nbytes)

    def dequantize(self) -> NDArray[np.float32]:
        """The weights as a read-only float32 array of `shape`; F32 is the mapped file itself, not a copy."""
        return dequantize(self.data, self.format, self.shape)
