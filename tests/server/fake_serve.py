"""`headrace serve` without a model: python -m tests.server.fake_serve PORT DRAIN_TIMEOUT_S."""

from __future__ import annotations

import sys

from headrace.server import serve as module
from headrace.server.build import ServeConfig
from tests.server.fakes import FakeEngine, make_deployment

if __name__ == "__main__":
    module.build = lambda *_, **__: make_deployment(FakeEngine(step_s=0.02))  # type: ignore[assignment]
    module.serve(ServeConfig(), module.ServerOptions(port=int(sys.argv[1]), drain_timeout_s=float(sys.argv[2])))
