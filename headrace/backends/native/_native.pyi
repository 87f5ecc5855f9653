"""The compiled module (native/binding.cpp documents it); typed as Any."""

from typing import Any

def __getattr__(name: str) -> Any: ...
