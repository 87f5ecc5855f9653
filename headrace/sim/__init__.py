"""The virtual clock that drives the same scheduler. Nothing yet; the plan is in the docs."""
