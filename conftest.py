"""What every test of the repository shares: a quiet, reproducible environment without a network.

Set before torch is imported, and inherited by the processes that tests start.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

_LOCAL = ("127.0.0.1", "::1", "localhost")

for _name in [name for name in os.environ if name.startswith("DEEPINFER_")]:
    del os.environ[_name]  # a developer's own settings must not decide whether a test passes
os.environ["DEEPINFER_ACCELERATOR"] = "cpu"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # as the cpu backend sets it
os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is imported, by whichever test is first
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # one process a core; the controller's own value has been inherited
else:
    os.environ.setdefault("OMP_NUM_THREADS", str(min(4, os.cpu_count() or 1)))  # all cores in one process


@pytest.fixture(scope="session", autouse=True)
def _no_network() -> Iterator[None]:
    """Connecting to anything but this machine is an error, so that no test depends on a network."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else None
        if host is not None and host not in _LOCAL and host != socket.gethostname():
            raise RuntimeError(f"a test tried to reach {address}; tests run without a network")
        return connect(self, address)

    socket.socket.connect = local_only  # type: ignore[method-assign]
    yield
    socket.socket.connect = connect  # type: ignore[method-assign]
