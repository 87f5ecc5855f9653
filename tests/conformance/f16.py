"""A GGUF file in 16 bits, from one in any format that the gguf package can read."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np

ALIGNMENT = 32


def to_f16(source: Path, target: Path) -> None:
    """Matrices become F16, vectors F32; the metadata stay as they are, byte for byte."""
    reader = gguf.GGUFReader(source)
    assert reader.alignment == ALIGNMENT
    own = [field for name, field in reader.fields.items() if not name.startswith("GGUF.")]
    begin = min(field.offset for field in own)
    end = max(field.offset + sum(part.nbytes for part in field.parts) for field in own)
    infos, tensors, offset = b"", [], 0
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = gguf.GGMLQuantizationType.F16 if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        data = np.ascontiguousarray(values, np.float16 if values.ndim > 1 else np.float32).tobytes()
        name = tensor.name.encode()
        infos += struct.pack("<Q", len(name)) + name + struct.pack("<I", values.ndim)
        infos += struct.pack(f"<{values.ndim}Q", *reversed(values.shape)) + struct.pack("<IQ", kind, offset)
        tensors.append(data + bytes(-len(data) % ALIGNMENT))
        offset += len(tensors[-1])
    with source.open("rb") as read, target.open("wb") as out:
        read.seek(begin)
        metadata = read.read(end - begin)
        out.write(struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(own)) + metadata + infos)
        out.write(bytes(-out.tell() % ALIGNMENT))
        for data in tensors:
            out.write(data)
