"""Run a supervisor with ranks of a test.

Arguments: the idle timeout, the ``Limits`` as JSON, the rank's file, and a folder of
certificates if it is to listen, or ``forwarded``.
"""

import logging
import sys
from pathlib import Path

import msgspec

from parallel_backend.machines.gateway.process import Listening
from parallel_backend.machines.links.address import Address
from parallel_backend.machines.settings import Settings
from parallel_backend.protocol.endpoint import Endpoint
from parallel_backend.supervisor.limits import Limits
from parallel_backend.supervisor.supervisor import Supervisor

if __name__ == "__main__":
    worker = str(Path(__file__).with_name(sys.argv[3]))
    limits = msgspec.json.decode(sys.argv[2], type=Limits)
    address = Address(host="127.0.0.1", port=0)
    others = None
    if sys.argv[4:] == ["forwarded"]:
        others = Settings(forwarded=True)
    elif sys.argv[4:]:
        others = Settings(listening=Listening(address=address, certificates=Path(sys.argv[4])))
    supervisor = Supervisor(
        endpoint=Endpoint.default(), idle_timeout=float(sys.argv[1]), command=(sys.executable, worker), limits=limits,
        machines=others,
    )  # fmt: skip
    logging.basicConfig(level=logging.DEBUG, handlers=[supervisor.logs.handler()])
    supervisor.serve()
