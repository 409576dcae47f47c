"""Run a supervisor whose ranks are ``fake_worker``. Arguments: the idle timeout, and the ``Limits`` as JSON."""

import logging
import sys
from pathlib import Path

import msgspec

from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.supervisor.limits import Limits
from parallel_backend.supervisor.supervisor import Supervisor

if __name__ == "__main__":
    worker = str(Path(__file__).with_name("fake_worker.py"))
    limits = msgspec.json.decode(sys.argv[2], type=Limits)
    supervisor = Supervisor(
        endpoint=Endpoint.default(), idle_timeout=float(sys.argv[1]), command=(sys.executable, worker), limits=limits
    )
    logging.basicConfig(level=logging.DEBUG, handlers=[supervisor.logs.handler()])
    supervisor.serve()
