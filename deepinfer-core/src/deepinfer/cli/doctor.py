"""`deepinfer doctor`: what is installed, which backends work here, what would be chosen; `--fit`: what would fit.

Every check is made to the end and reported, so that one run shows all problems. Exit code 1 if no engine can start.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from deepinfer.cli.text import format_bytes, print_table
from deepinfer.environ import Settings
from deepinfer.errors import DeepInferError

HELP = "Examines this installation: packages, backends and their probes, settings. With --fit: sizes of a model."
EXAMPLES = """\
examples:
  deepinfer doctor
  deepinfer doctor --fit full --sequences 64 --context 32768      from a built-in configuration, no weights needed
  deepinfer doctor --fit /data/DeepSeek-V4.1-Flash-1017           a checkpoint directory or a config.json
"""

_PACKAGES = ("torch", "numpy", "pluggy", "safetensors", "tokenizers", "huggingface_hub", "tqdm", "rich-argparse")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `deepinfer doctor`."""
    add = parser.add_argument
    add("--json", action="store_true", help="machine-readable")
    add("--accelerator", metavar="NAME", help="judge as if this backend were chosen")
    fit = parser.add_argument_group("sizes of a model")
    fit.add_argument("--fit", metavar="CONFIG", help="tiny, micro, full, a config.json, a checkpoint or a hub id")
    fit.add_argument("--sequences", type=int, default=256, metavar="N", help="sequences at a time (default: 256)")
    fit.add_argument("--context", type=int, default=4096, metavar="TOKENS", help="tokens of each (default: 4096)")


def run(args: argparse.Namespace) -> int:
    """Prints one of the two reports."""
    if args.fit:
        from deepinfer.cli.fit import fit_report, print_fit

        report = fit_report(args.fit, args.sequences, args.context)
        if args.json:
            print(json.dumps(report, indent=2))
        else:
            print_fit(report)
        return 0
    report = examine(args.accelerator)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)
    return 1 if report["problems"] else 0


def examine(accelerator: str | None = None) -> dict[str, Any]:
    """The report as plain data. Raises nothing that a broken installation can cause: problems are entries."""
    problems: list[str] = []
    settings = Settings()
    try:
        settings = Settings.load(accelerator=accelerator)
    except DeepInferError as error:
        problems += str(error).splitlines()
    return {
        "machine": _machine(),
        "packages": {name: _version(name) for name in ("deepinfer-core", *_PACKAGES)},
        "backends": _backends(),
        "op_packs": _op_packs(settings),
        "chosen": _chosen(settings, problems),
        "settings": [row.as_dict() for row in settings.describe() if row.origin != "default"],
        "problems": problems,
    }


def _machine() -> dict[str, Any]:
    return {
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _physical_memory(),
    }


def _physical_memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _backends() -> list[dict[str, Any]]:
    """Every installed backend with the answer of its probe and the requirements it misses."""
    from deepinfer.hooks import discover

    rows = []
    for state in discover.survey():
        unmet = "" if state.state == "broken" else _unmet_requirements(state.entry)
        rows.append(
            {
                "name": state.entry.name,
                "state": state.state,
                "package": f"{state.entry.distribution} {state.entry.version}",
                "registered_in": state.entry.file,
                "detail": state.detail or unmet,
            }
        )
    return rows


def _unmet_requirements(entry: Any) -> str:
    from deepinfer.hooks import Backend, discover, requirements

    try:
        record = discover.load_record(entry, Backend)
        requirements.check_requirements(entry, record.requires, discover.call)
    except DeepInferError as error:
        return str(error)
    return ""


def _op_packs(settings: Settings) -> list[dict[str, Any]]:
    from deepinfer.hooks import discover

    return [
        {
            "name": entry.name,
            "state": "named" if entry.name in settings.op_packs else "not used",
            "package": f"{entry.distribution} {entry.version}",
        }
        for entry in discover.installed(discover.OP_PACKS)
    ]


def _chosen(settings: Settings, problems: list[str]) -> dict[str, Any] | None:
    """Opens the backend as an engine would; what goes wrong becomes a problem."""
    from deepinfer.hooks.load import open_backend

    try:
        loaded = open_backend(settings=settings)
    except DeepInferError as error:
        problems.append(str(error))
        return None
    return {
        "name": loaded.name,
        "reason": loaded.reason,
        "device_type": loaded.device_type,
        "providers": [str(provider) for provider in loaded.providers],
        "findings": [list(pair) for answer in loaded.manager.hook.deepinfer_findings() for pair in answer],
        "environment": dict(loaded.environment),
    }


def _print_report(report: dict[str, Any]) -> None:
    machine, memory = report["machine"], report["machine"]["memory_bytes"]
    print(f"Python {machine['python']}\n{machine['system']}")
    print(f"{machine['cores']} usable cores, {format_bytes(memory) if memory else 'unknown'} of memory\n")
    print_table(("package", "version"), [(n, v or "not installed") for n, v in report["packages"].items()])
    print()
    rows = [(b["name"], b["state"], b["package"]) for b in report["backends"]]
    print_table(("backend", "state", "package"), rows)
    for backend in report["backends"]:
        if backend["detail"]:
            print(f"\n  {backend['name']}: " + backend["detail"].replace("\n", "\n  "))
    if report["chosen"] and report["chosen"]["findings"]:
        print()
        print_table((f"{report['chosen']['name']} found", ""), [tuple(pair) for pair in report["chosen"]["findings"]])
    if report["op_packs"]:
        print()
        print_table(("op pack", "state", "package"), [tuple(p.values()) for p in report["op_packs"]])
    for row in report["settings"]:
        print(f"\n{row['name']}={row['value']} (from {row['origin']})", end="")
    print(f"\n{_conclusion(report)}")


def _conclusion(report: dict[str, Any]) -> str:
    if report["problems"]:
        found = "\n".join(f"  {problem}".replace("\n", "\n  ") for problem in report["problems"])
        return f"An engine cannot start here:\n{found}"
    chosen = report["chosen"]
    return f"Ready: an engine would run on {chosen['name']} ({chosen['reason']})."
