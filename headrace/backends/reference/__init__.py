"""The reference: what each op means, in NumPy and float32."""

from headrace.backends.reference.model import ReferenceModel

__all__ = ["ReferenceModel"]
