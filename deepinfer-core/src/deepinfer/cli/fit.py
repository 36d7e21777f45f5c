"""The sizes behind `deepinfer doctor --fit`: weights, cache per token, state per sequence, and their sum.

Everything follows from a configuration; no weight is read and nothing is measured. Work space of a step (activations,
logits) comes on top and depends on the backend.
"""

from __future__ import annotations

from typing import Any

from deepinfer.cli.models import read_config
from deepinfer.cli.text import format_bytes, print_table
from deepinfer.environ import Settings
from deepinfer.errors import ConfigError


def fit_report(source: str, sequences: int, context: int) -> dict[str, Any]:
    """Sizes in bytes for `sequences` sequences of `context` tokens each; ConfigError if either makes no sense."""
    from deepinfer.models.deepseek_v41 import sizes

    config = read_config(source)
    limit = config.text.max_position_embeddings
    if sequences < 1 or not 1 <= context <= limit:
        raise ConfigError(
            f"--sequences {sequences} --context {context}: expected at least 1, and at most {limit} tokens"
        )
    backtracking = Settings.load().max_backtracking_tokens
    weights = sizes.weight_bytes(config)
    per_token, per_sequence = sizes.cache_bytes_per_token(config), sizes.state_bytes(config, backtracking)
    cache, state = sequences * context * per_token, sequences * per_sequence
    counts = sizes.count_parameters(config)
    return {
        "config": source,
        "parameters": {
            "total": counts.total,
            "backbone": counts.backbone,
            "engram": counts.engram,
            "draft": counts.draft,
            "vision": counts.vision,
            "active_per_decoded_token": counts.active_decode,
            "active_per_prefill_token": counts.active_prefill,
        },
        "weights": weights | {"total": sum(weights.values())},
        "cache_per_token": per_token,
        "state_per_sequence": per_sequence,
        "sequences": sequences,
        "context": context,
        "cache_total": cache,
        "state_total": state,
        "total": sum(weights.values()) + cache + state,
    }


def print_fit(report: dict[str, Any]) -> None:
    """The report for people."""
    parameters = report["parameters"]
    print(f"{report['config']}: {_count(parameters['total'])} parameters, of which")
    parts = ("backbone", "engram", "draft", "vision")
    print("  " + ", ".join(f"{part} {_count(parameters[part])}" for part in parts))
    decode, prefill = parameters["active_per_decoded_token"], parameters["active_per_prefill_token"]
    print(f"  active per decoded token {_count(decode)}, per prompt token in the encoder half {_count(prefill)}\n")
    rows = [(f"  {part}", *_size(size)) for part, size in report["weights"].items() if part != "total"]
    rows = [("weights", *_size(report["weights"]["total"])), *rows]
    rows.append(("cache per token", *_size(report["cache_per_token"])))
    rows.append(("state per sequence", *_size(report["state_per_sequence"])))
    sequences, context = report["sequences"], report["context"]
    rows.append((f"cache of {sequences} x {context} tokens", *_size(report["cache_total"])))
    rows.append((f"state of {sequences} sequences", *_size(report["state_total"])))
    rows.append(("together, without work space", *_size(report["total"])))
    print_table(("what", "size", "bytes"), rows)


def _size(count: int) -> tuple[str, str]:
    return format_bytes(count), f"{count:,}"


def _count(number: int) -> str:
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= unit:
            return f"{number / unit:.4g} {name}"
    return str(number)
