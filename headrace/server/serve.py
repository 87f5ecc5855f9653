"""`headrace serve`: a model, a port, and an end in good order."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType

import uvicorn

from headrace.core.errors import ConfigurationError
from headrace.models.progress import Progress
from headrace.server.app import create_app
from headrace.server.build import ServeConfig, build
from headrace.server.limits import CallLimits
from headrace.server.service import Service

log = logging.getLogger("headrace.server")

SWITCH_INTERVAL_S = 0.0002
"""Python's own 5 ms would let the engine's thread keep the event loop waiting that long, at every step."""
GC_THRESHOLDS = (20_000, 20, 50)
"""A step makes hundreds of objects, none in a cycle; at Python's own 700 each would be looked at every other step."""
SHUTDOWN_S = 5
"""For clients that do not read the end of their streams."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What the server needs beside the model."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one; the ready line names it."""
    aliases: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    origins: tuple[str, ...] = ()
    """Sites whose pages may use the server from a browser; "*": all."""
    drain_timeout_s: float = 60.0
    """How long running replies may take to finish after the first SIGTERM or SIGINT."""
    log_requests: bool = True
    """One line per finished call, on standard error."""
    access_log: bool = False
    limits: CallLimits = field(default_factory=CallLimits)


def settle_interpreter() -> None:
    """After loading, before serving: what is there stays, and is not looked at by the garbage collector again."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """What has been imported stays, and what is made meanwhile is looked at once, by `settle_interpreter`."""
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def serve(
    config: ServeConfig,
    options: ServerOptions,
    progress: contextlib.AbstractContextManager[Progress | None] = contextlib.nullcontext(),  # noqa: B008
) -> None:
    """Load the model, listen, and serve until a signal has drained the server.

    `progress` is entered while the model is fetched and loaded. Prints one line on standard output when both the port
    listens and the model is loaded. Raises `ConfigurationError` for a port that cannot be had, and whatever `build`
    raises.
    """
    _configure_logging(options)
    listener = bind(options.host, options.port)  # before the model is loaded: the commonest mistake costs no wait
    with contextlib.closing(listener):
        start_s = time.monotonic()
        with _uncollected():
            with progress as report:
                deployment = build(config, report, constrains=True)
                deployment.grammars.prepare()  # else its end would hold up the first streams
            load_s = time.monotonic() - start_s
            app = create_app(
                deployment,
                limits=options.limits,
                aliases=options.aliases,
                api_keys=options.api_keys,
                origins=options.origins,
            )
            settle_interpreter()

        def announce() -> None:
            host, port = listener.getsockname()[:2]
            host = f"[{host}]" if ":" in host else host
            print(
                f"Headrace ready: http://{host}:{port}/v1  model {deployment.name}  context "
                f"{deployment.context_length}  loaded in {load_s:.1f} s",
                flush=True,
            )

        server = _Server(
            uvicorn.Config(
                app,
                loop="uvloop" if sys.platform != "win32" else "asyncio",
                http="httptools",
                ws="none",
                lifespan="on",
                access_log=options.access_log,
                log_config=None,
                server_header=False,
                timeout_graceful_shutdown=SHUTDOWN_S,
            ),
            app.state.service,
            options.drain_timeout_s,
            announce,
        )
        try:
            server.run(sockets=[listener])
        except OSError as error:  # two servers can bind a port that neither listens on yet; the second ends here
            raise _port_trouble(options.host, options.port, error) from error


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises `ConfigurationError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _port_trouble(host, port, error) from error
    try:
        if sys.platform != "win32":  # there it would let two servers share the port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _port_trouble(host, port, error) from error
    return listener


def _port_trouble(host: str, port: int, error: OSError) -> ConfigurationError:
    if error.errno == errno.EADDRINUSE:
        return ConfigurationError(
            f"port {port} on {host} is in use; choose another with --port, or 0 for any free one."
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        return ConfigurationError(
            f"port {port} on {host} is not allowed to this user; choose one above 1023 with --port."
        )
    return ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}.")


class _Server(uvicorn.Server):
    """uvicorn, but a signal first drains: the port keeps answering (503) while running replies finish."""

    def __init__(
        self, config: uvicorn.Config, service: Service, drain_timeout_s: float, announce: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._service = service
        self._drain_timeout_s = drain_timeout_s
        self._announce = announce
        self._is_stopping = False
        self._drain: asyncio.Task[None] | None = None  # held, or it could be collected while it runs

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._announce()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """In place of uvicorn's, which would raise the signal again after the end: ours is a success."""
        loop = asyncio.get_running_loop()

        def on_signal(number: int, frame: FrameType | None) -> None:
            if self._is_stopping:  # not by way of the loop, which may be what hangs
                os.write(2, b"A second signal: stopped at once, running calls are cut off.\n")
                os._exit(1)
            self._is_stopping = True
            loop.call_soon_threadsafe(self._begin_drain)

        before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _begin_drain(self) -> None:
        self._drain = asyncio.get_running_loop().create_task(self._drain_and_exit())

    async def _drain_and_exit(self) -> None:
        num_calls = self._service.num_calls
        log.info("Shutting down: %d calls may finish, for up to %g s.", num_calls, self._drain_timeout_s)
        if not await self._service.drain(self._drain_timeout_s):
            log.warning("Some calls took longer than %g s and were aborted.", self._drain_timeout_s)
        self.should_exit = True


def _configure_logging(options: ServerOptions) -> None:
    logging.basicConfig(
        stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("headrace").setLevel(logging.INFO)
    logging.getLogger("headrace.requests").setLevel(logging.INFO if options.log_requests else logging.WARNING)
    if options.access_log:
        logging.getLogger("uvicorn.access").setLevel(logging.INFO)
