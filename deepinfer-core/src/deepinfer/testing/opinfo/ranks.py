"""Several processes for the communicator's checks: starts them, and is what each of them runs.

    python -m deepinfer.testing.opinfo.ranks BACKEND FOLDER

Each rank opens the backend by its name, runs `collectives.CHECKS` and writes what they came to into FOLDER. A check
that fails on one rank may leave the others waiting, so the ranks stop there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from deepinfer.testing.results import Failure, Skip

TIMEOUT = 60.0
"""Seconds until a rank gives up waiting for the others."""

Outcome = dict[str, str]
"""{op: "" if it passed, else the story}; a check that was not reached is missing"""


def run_ranks(backend: str, size: int) -> list[Outcome]:
    """Outcome on every rank of a world of `size` processes. Raises `Failure` for ranks that end without one."""
    with tempfile.TemporaryDirectory() as folder:
        common = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
        command = [sys.executable, "-m", __name__, backend, folder]
        processes = [
            subprocess.Popen(
                command, env=os.environ | common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )
            for rank in range(size)
        ]  # fmt: skip
        try:
            outputs = [process.communicate(timeout=4 * TIMEOUT)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for rank, (process, output) in enumerate(zip(processes, outputs, strict=True)):
            if process.returncode:
                raise Failure(f"rank {rank} of {size} ended with {process.returncode}:\n{output[-2000:]}")
        return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(size)]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def outcome_of(results: list[Outcome], op: str) -> str:
    """Raise `Failure` if the op's check failed on a rank, `Skip` if it was not reached; returns a remark."""
    for rank, result in enumerate(results):
        if "skip" in result:
            raise Skip(result["skip"])
        if result.get(op):
            raise Failure(f"on rank {rank} of {len(results)}: {result[op]}")
    stopped = {name for result in results for name, story in result.items() if story}
    if not all(op in result for result in results):
        raise Skip(f"not reached: the ranks stopped at {', '.join(sorted(stopped)) or 'an earlier check'}")
    return f"{len(results)} ranks"


def main(backend: str, folder: Path) -> None:
    """One rank."""
    from deepinfer.environ import Settings
    from deepinfer.errors import BackendError
    from deepinfer.testing.opinfo.collectives import CHECKS, WORLD, Member, partitions
    from deepinfer.testing.subject import make_subject

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    subject = make_subject(backend, settings=Settings.load(gloo_timeout=TIMEOUT))
    results: Outcome = {}
    try:
        device = subject.ops.runtime.select(rank)
    except BackendError as error:
        results["skip"] = f"{size} ranks need as many devices: {error}"
    else:
        subject.ops.communicator.open(partitions(size))
        me = Member(subject.ops, device, rank, size)
        for op, check in CHECKS.items():
            results[op] = _story(check, me)
            if _somebody_failed(me, results[op], op == "close", WORLD):
                break
    (folder / f"{rank}.json").write_text(json.dumps(results))
    if results.get("close", "not reached"):
        os._exit(0)  # groups left open may have threads that abort an orderly end, which would hide this story


def _story(check: object, me: object) -> str:
    try:
        check(me)  # type: ignore[operator]
    except Failure as failure:
        return str(failure)
    except Exception:
        return traceback.format_exc()
    return ""


def _somebody_failed(me: object, story: str, closed: bool, world: str) -> bool:
    """Whether to stop; all ranks agree unless the transport itself is broken."""
    if closed:
        return True
    try:
        return any(me.ops.communicator.gather_objects(story, world))  # type: ignore[attr-defined]
    except Exception:
        return True


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
