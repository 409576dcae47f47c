"""Run a supervisor with ranks of a test. Arguments: the idle timeout, the ``Limits`` as JSON, and the rank's file."""

import logging
import sys
from pathlib import Path

import msgspec

from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.supervisor.limits import Limits
from parallel_backend.supervisor.supervisor import Supervisor

if __name__ == "__main__":
    worker = str(Path(__file__).with_name(sys.argv[3]))
    limits = msgspec.json.decode(sys.argv[2], type=Limits)
    supervisor = Supervisor(
        endpoint=Endpoint.default(), idle_timeout=float(sys.argv[1]), command=(sys.executable, worker), limits=limits
    )
    logging.basicConfig(level=logging.DEBUG, handlers=[supervisor.logs.handler()])
    supervisor.serve()
