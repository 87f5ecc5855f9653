"""The virtual clock that drives the same scheduler. Nothing yet; see the docs."""
