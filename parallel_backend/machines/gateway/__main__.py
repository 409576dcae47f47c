"""The gateway's process, which the supervisor starts: ``python -m parallel_backend.machines.gateway ...``."""

import argparse
import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ...errors import BackendError
from ...processes import die_with_parent
from ..certificates.tls import Credentials
from .admission import Admission
from .gateway import Gateway
from .sparing_log import SparingFilter


def main(argv: Sequence[str] | None = None) -> int:
    """Run the gateway until the supervisor ends it."""
    die_with_parent()
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # Ctrl-C in the supervisor's terminal is only for the supervisor
    options = _parse(argv)
    handler = logging.StreamHandler()
    handler.addFilter(SparingFilter())
    logging.basicConfig(level=logging.INFO, format="%(asctime)s gateway: %(message)s", handlers=[handler])
    try:
        credentials = Credentials.of_server(options.certificates)
        context = credentials.server_context()
    except BackendError as error:
        print(error, file=sys.stderr)
        return 1
    admission = Admission(context=context, token=credentials.token, supervisor=options.supervisor)
    with socket.socket(fileno=options.listen_fd) as listener:
        asyncio.run(Gateway(listener, admission).serve())
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m parallel_backend.machines.gateway")
    parser.add_argument("--listen-fd", type=int, required=True, help="descriptor of the listening socket")
    parser.add_argument("--supervisor", type=Path, required=True, help="the supervisor's socket")
    parser.add_argument("--certificates", type=Path, required=True, help="folder of the certificates")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
