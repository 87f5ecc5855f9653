"""How long replies will be. Each module is one `LengthPredictor` (see `headrace.core.protocols`)."""
