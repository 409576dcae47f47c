"""``python -m parallel_backend serve``: run the backend by hand, for this machine, others, and with their devices."""

import argparse
import logging
import sys
from dataclasses import dataclass

from . import env
from .client import query
from .client.launch import ALREADY_RUNS, START_TIMEOUT, connect_or_start
from .client.local_devices import local_devices
from .errors import BackendUnavailable, InvalidRequest
from .protocol.address import Address
from .protocol.endpoint import Endpoint, passed_over
from .protocol.interfaces import address_of
from .protocol.status import Status
from .protocol.tls import Credentials, default_folder
from .supervisor.gateway_process import Listening, OtherMachines
from .supervisor.limits import Limits
from .supervisor.supervisor import Supervisor

log = logging.getLogger(__name__)

IDLE_TIMEOUT = 600.0
"""Default for the seconds without work after which a backend ends that only this machine uses."""
PORT = 7400
"""Where a backend with several hosts listens, unless an address says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What is asked of ``serve``.

    Attributes:
        endpoint: the backend's.
        idle_timeout: seconds without work after which it ends; 0 for never.
        spares: number of spare ranks; None for as many as fit.
        machines: what other machines have to do with it.
    """

    endpoint: Endpoint
    idle_timeout: float
    spares: int | None
    machines: OtherMachines

    @property
    def arguments(self) -> tuple[str, ...]:
        """The options that a process in the background has to be given; it inherits the environment."""
        listening, nodes, interface = self.machines.listening, self.machines.nodes, self.machines.interface
        listen = ("--listen", str(listening.address)) if listening else ()
        return listen + (("--nnodes", str(nodes), "--interface", interface) if interface else ())


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "--idle-timeout", type=_seconds, metavar="SECONDS", help="idle time after which it ends; 0 means never"
    )
    add_spares(parser)
    parser.add_argument(
        "--listen", metavar="ADDRESS:PORT",
        help="let other machines connect here, with TLS and certificates; the backend then runs until it is stopped, "
        "unless an idle time is given",
    )  # fmt: skip
    parser.add_argument(
        "--nnodes", type=_count, default=1, metavar="N",
        help="number of hosts whose devices ranks may use, this one included; the others join with the command that "
        f"is printed, at the interface's address and port {PORT} unless --listen says otherwise",
    )  # fmt: skip
    parser.add_argument(
        "--interface", default="", metavar="NAME",
        help="the private network interface over which ranks of different hosts talk, without encryption",
    )  # fmt: skip
    add_share_models(parser)
    parser.add_argument("--detach", action="store_true", help="run in the background; return once the backend answers")
    parser.add_argument("--quiet", action="store_true", help="log to the log folder alone, not to stderr as well")


def add_spares(parser: argparse.ArgumentParser) -> None:
    """Add the option that sets the number of spare ranks on this host."""
    parser.add_argument(
        "--spares", type=_count, metavar="N",
        help="number of spare ranks, which take the place of dead ones; 0 for none (default: as many as there are "
        "ranks on this machine, if they take little of its memory)",
    )  # fmt: skip


def add_share_models(parser: argparse.ArgumentParser) -> None:
    """Add the option that lets models go from host to host."""
    parser.add_argument(
        "--share-models", action="store_true",
        help="send models to hosts that lack them, into the first of their model folders (also "
        f"{env.SHARE_MODELS}=1)",
    )  # fmt: skip


def share_models(options: argparse.Namespace) -> None:
    """Note in the environment, which ranks inherit, whether models are shared.

    Raises:
        InvalidRequest: the environment's value is none that is known.
    """
    if not env.SHARE_MODELS.get() and options.share_models:
        env.SHARE_MODELS.set("1")


def run(options: argparse.Namespace) -> int:
    """Serve until stopped, or start a backend in the background.

    Raises:
        BackendError: an option does not fit, or the backend does not start.
    """
    serving = parse(options)
    if options.detach:
        return _detach(serving, options)
    return serve(serving, quiet=options.quiet)


def parse(options: argparse.Namespace) -> Serving:
    """Check the options and the environment.

    Raises:
        InvalidRequest: one of them does not fit.
    """
    endpoint = own_endpoint()
    share_models(options)
    if options.share_models and options.nnodes == 1:
        raise InvalidRequest("--share-models: there is only one host; --nnodes and --interface name others")
    if options.nnodes < 1 or (options.nnodes > 1) != bool(options.interface):
        raise InvalidRequest(
            f"--nnodes {options.nnodes} with --interface {options.interface or 'missing'}: several hosts need the name "
            "of the private network interface between them, and one host has no use for it"
        )
    listen = options.listen or (f"{address_of(options.interface)}:{PORT}" if options.interface else None)
    return Serving(
        endpoint=endpoint,
        idle_timeout=_idle_timeout(options.idle_timeout, 0.0 if listen else IDLE_TIMEOUT),
        spares=spares_asked(options.spares),
        machines=OtherMachines(
            listening=listening_at(listen) if listen else None,
            nodes=options.nnodes,
            interface=options.interface,
            devices=local_devices("all") if listen and not options.detach else None,
        ),
    )


def own_endpoint() -> Endpoint:
    """Return the endpoint of a backend on this machine.

    Raises:
        InvalidRequest: the environment names one on another machine.
    """
    endpoint = Endpoint.default()
    if endpoint.remote is not None:
        raise InvalidRequest(
            f"{env.BACKEND} names the backend at {endpoint.remote}: unset it to run one on this machine"
        )
    return endpoint


def listening_at(text: str) -> Listening:
    """Return where to listen for other machines, once the certificates for that are known to be usable.

    Raises:
        InvalidRequest: it is no address, or a certificate is missing or unusable.
    """
    address, folder = Address.parse(text, what="--listen"), default_folder()
    Credentials.of_server(folder).server_context()
    return Listening(address=address, certificates=folder)


def serve(serving: Serving, *, quiet: bool = False) -> int:
    """Serve until stopped, and return the exit status.

    Raises:
        BackendError: the backend does not start.
    """
    try:
        supervisor = Supervisor(
            endpoint=serving.endpoint, idle_timeout=serving.idle_timeout, limits=Limits(spares=serving.spares),
            machines=serving.machines,
        )  # fmt: skip
    except BackendUnavailable as error:
        print(error, file=sys.stderr)
        return ALREADY_RUNS
    handlers = [supervisor.logs.handler(), *([] if quiet else [logging.StreamHandler()])]
    logging.basicConfig(level=logging.INFO, format="%(asctime)s supervisor: %(message)s", handlers=handlers)
    for line in filter(None, (passed_over(serving.endpoint), *_advice(serving))):
        log.warning(line)
    supervisor.serve()
    return 0


def _advice(serving: Serving) -> list[str]:
    """Return what whoever starts several hosts has to know and do."""
    if serving.machines.nodes == 1 or not serving.machines.listening:
        return []
    warning = (
        f"ranks of different hosts talk over {serving.machines.interface} without encryption or authentication: nobody "
        "else may be in that network"
    )
    command = (
        f"python -m parallel_backend host --connect {serving.machines.listening.address} --interface NAME --node "
        f"{'1' if serving.machines.nodes == 2 else f'1 to {serving.machines.nodes - 1}'}"
    )
    return [warning, f"on the other hosts, with the files of this one's certificates, run: {command}"]


def _detach(serving: Serving, options: argparse.Namespace) -> int:
    if serving.spares is not None:
        env.SPARES.set(str(serving.spares))  # the backend inherits it
    _connect(serving)
    try:
        status = query.status(serving.endpoint)
    except BackendUnavailable:  # it may end, say of a port in use, once it can be connected to: a new start says why
        _connect(serving)
        status = query.status(serving.endpoint)
    if other := _difference(status, serving.machines, options):
        raise BackendUnavailable(f"a backend that {other} already runs: stop it first")
    print(f"the backend runs, pid {status.pid}" + (f", and listens at {status.listens}" if status.listens else ""))
    print(*_advice(serving), sep="\n", end="\n" if serving.machines.nodes > 1 else "")
    return 0


def _connect(serving: Serving) -> None:
    connect_or_start(
        serving.endpoint, connect_seconds=query.ANSWER_TIMEOUT, start_seconds=START_TIMEOUT,
        idle_timeout=serving.idle_timeout, options=serving.arguments,
    ).close()  # fmt: skip


def _difference(status: Status, machines: OtherMachines, options: argparse.Namespace) -> str:
    """Return what a backend does otherwise than the options say, as the end of a sentence; "" for nothing."""
    if machines.listening and not status.listens:
        return "does not listen for other machines"
    if machines.listening and len(status.hosts) != machines.nodes:
        return f"was started with --nnodes {len(status.hosts)}"
    address = machines.listening and machines.listening.address
    if options.listen and address and address.port and status.listens.partition(",")[0] != str(address):
        return f"listens at {status.listens}"
    if machines.interface not in ("", status.interface):
        return f"was started with --interface {status.interface}"
    if options.share_models and not status.shares_models:
        return "does not share models"
    if options.idle_timeout not in (None, status.idle_timeout):
        return f"ends after {status.idle_timeout:g} s without work" if status.idle_timeout else "never ends by itself"
    if options.spares not in (None, status.most_spares):
        kept = "as many spare ranks as fit" if status.most_spares is None else f"{status.most_spares} spare ranks"
        return f"keeps {kept}"
    return ""


def _seconds(text: str) -> float:
    try:
        return env.seconds(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more") from error


def _count(text: str) -> int:
    try:
        return env.count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number, 0 or more") from error


def spares_asked(option: int | None) -> int | None:
    """Return the number of spare ranks that the option or the environment asks for, None for neither.

    Raises:
        InvalidRequest: the environment's is no number.
    """
    return env.SPARES.get() if option is None else option


def _idle_timeout(option: float | None, default: float) -> float:
    asked = env.IDLE_TIMEOUT.get() if option is None else option
    return default if asked is None else asked
