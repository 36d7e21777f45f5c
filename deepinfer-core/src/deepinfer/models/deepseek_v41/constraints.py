"""Rules between configuration keys: what the layer lists, sizes and derived numbers must satisfy together.

Called once by `config.py` after every key alone has been found acceptable. Rules that only one backend's kernels need
are not here; a backend refuses ops instead. Each rule adds one line naming key, found and expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from deepinfer.errors import ConfigError
from deepinfer.models.deepseek_v41.topology import source_map


def check(keys: Any) -> None:
    """Check the keys of a whole `config.json` against each other; raises ConfigError with one line per fault."""
    text = keys.text_config
    # Later rules build on earlier ones (a map needs sorted lists), so stop at the first group with a fault.
    for group in (_sizes, _layer_lists, _sharing, _candidates, _engram):
        faults = list(group(text))
        if group is _sizes:
            faults += [*_token_ids(keys), *_vision(keys.vision_config)]
        if faults:
            raise ConfigError("\n".join(faults))


def _fault(key: str, found: Any, expected: str) -> str:
    found = list(found) if isinstance(found, tuple) else found
    return f"{key}: found {found}, expected {expected}"


def _sizes(text: Any) -> Iterator[str]:
    if text.num_attention_heads % text.o_groups:
        heads = text.num_attention_heads
        yield _fault("text_config.o_groups", text.o_groups, f"a divisor of num_attention_heads = {heads}")
    for prefix in ("", "dspark_"):
        experts_key = f"{prefix}n_routed_experts"
        experts, chosen = getattr(text, experts_key), getattr(text, f"{prefix}num_experts_per_tok")
        if chosen > experts:
            key = f"text_config.{prefix}num_experts_per_tok"
            yield _fault(key, chosen, f"at most {experts_key} = {experts}")
    scaling = text.rope_scaling
    if scaling is not None and scaling.beta_fast < scaling.beta_slow:
        expected = f"at least beta_slow = {scaling.beta_slow}"
        yield _fault("text_config.rope_scaling.beta_fast", scaling.beta_fast, expected)


def _token_ids(keys: Any) -> Iterator[str]:
    text = keys.text_config
    vocab = f"an id below vocab_size = {text.vocab_size}"
    for key in ("bos_token_id", "eos_token_id", "pad_token_id", "image_token_id"):
        if getattr(keys, key) >= text.vocab_size:
            yield _fault(key, getattr(keys, key), vocab)
    for key in ("engram_pad_token_id", "dspark_noise_token_id"):
        if getattr(text, key) >= text.vocab_size:
            yield _fault(f"text_config.{key}", getattr(text, key), vocab)


def _vision(vision: Any) -> Iterator[str]:
    heads = vision.num_attention_heads
    if vision.hidden_size % (4 * heads):
        # two rotated axes of adjacent halves: a head has 4 equal parts
        expected = f"a multiple of 4 * num_attention_heads = {4 * heads}"
        yield _fault("vision_config.hidden_size", vision.hidden_size, expected)


def _layer_lists(text: Any) -> Iterator[str]:
    layers, drafts = text.num_hidden_layers, text.num_nextn_predict_layers
    ratios = text.compress_ratios
    if len(ratios) != layers + drafts:
        expected = f"num_hidden_layers + num_nextn_predict_layers = {layers + drafts} entries"
        yield _fault("text_config.compress_ratios", f"{len(ratios)} entries", expected)
    elif any(ratios[layers:]):
        yield _fault("text_config.compress_ratios", ratios[layers:], "0 for every draft layer at the end")
    if not set(ratios) <= {0, 1, 2}:
        yield _fault("text_config.compress_ratios", sorted(set(ratios)), "ratios 0, 1 and 2 only")
    elif 1 not in ratios[:layers]:
        yield _fault("text_config.compress_ratios", ratios, "a layer with ratio 1, where the decoder half begins")
    for key in ("kv_source_layer_ids", "index_source_layer_ids", "index_k_source_layer_ids"):
        ids = getattr(text, key)
        if ids is not None and not (ids and _ascending(ids) and ids[-1] < layers):
            yield _fault(f"text_config.{key}", ids, f"ascending layer numbers below {layers}, at least one")
    if not (_ascending(text.dspark_target_layer_ids) and _within(text.dspark_target_layer_ids, layers)):
        expected = f"ascending layer numbers below {layers}"
        yield _fault("text_config.dspark_target_layer_ids", text.dspark_target_layer_ids, expected)
    if drafts and not text.dspark_target_layer_ids:
        yield _fault("text_config.dspark_target_layer_ids", [], "at least one layer, because there are draft layers")


def _sharing(text: Any) -> Iterator[str]:
    layers, ratios = text.num_hidden_layers, text.compress_ratios
    kv, index = text.kv_source_layer_ids, text.index_source_layer_ids
    index_k = kv if text.index_k_source_layer_ids is None else text.index_k_source_layer_ids
    if not set(kv) <= set(index_k):
        yield _fault("text_config.kv_source_layer_ids", kv, f"only layers that store index keys: {list(index_k)}")
    if not set(index_k) <= set(index):
        key = "kv_source_layer_ids" if text.index_k_source_layer_ids is None else "index_k_source_layer_ids"
        yield _fault(f"text_config.{key}", index_k, f"only layers of index_source_layer_ids = {list(index)}")
    if index[0] < kv[0]:
        expected = f"no layer before the first of kv_source_layer_ids, {kv[0]}: there is nothing to select from"
        yield _fault("text_config.index_source_layer_ids", index, expected)
    yield from _ratio_sharing(ratios[:layers], kv)
    boundary = ratios.index(1)
    if boundary not in kv:
        expected = f"to contain layer {boundary}, the first with ratio 1: keys are not shared across the boundary"
        yield _fault("text_config.kv_source_layer_ids", kv, expected)


def _ratio_sharing(ratios: Sequence[int], kv: Sequence[int]) -> Iterator[str]:
    sources = source_map(kv, len(ratios), len(ratios))
    for layer, ratio in enumerate(ratios):
        key = f"text_config.compress_ratios[{layer}]"
        if layer < kv[0] and ratio:
            yield _fault(key, ratio, f"0 before the first of kv_source_layer_ids, {kv[0]}")
        elif layer in kv and not ratio:
            yield _fault(key, ratio, "1 or 2, because the layer is in kv_source_layer_ids")
        elif layer > kv[0] and ratio != ratios[sources[layer]]:
            expected = f"{ratios[sources[layer]]} like its source, layer {sources[layer]} (or a source of its own)"
            yield _fault(key, ratio, expected)


def _candidates(text: Any) -> Iterator[str]:
    if text.candidate_block_size not in (8, 16):
        yield _fault("text_config.candidate_block_size", text.candidate_block_size, "8 or 16")
    source = text.candidate_source_layer_id
    if source is None:
        return
    if source not in text.index_source_layer_ids:
        expected = f"a layer of index_source_layer_ids = {list(text.index_source_layer_ids)}, or null"
        yield _fault("text_config.candidate_source_layer_id", source, expected)
        return
    group = text.compress_ratios[source : text.num_hidden_layers]
    if len(set(group)) > 1:
        expected = f"a layer after which every ratio is its own, {group[0]}"
        yield _fault("text_config.candidate_source_layer_id", f"{source} with ratios {list(group)} after it", expected)
    entries = text.candidate_topk_blocks * text.candidate_block_size
    if entries < text.index_topk:
        expected = f"at least index_topk / candidate_block_size = {text.index_topk} / {text.candidate_block_size}"
        yield _fault("text_config.candidate_topk_blocks", text.candidate_topk_blocks, expected)
    if text.index_n_heads > 32:
        yield _fault("text_config.index_n_heads", text.index_n_heads, "at most 32 with candidate blocks")


def _engram(text: Any) -> Iterator[str]:
    ids = text.engram_layer_ids
    if len(set(ids)) != len(ids) or not _within(ids, text.num_hidden_layers):
        expected = f"different layer numbers below {text.num_hidden_layers}"
        yield _fault("text_config.engram_layer_ids", ids, expected)
        return
    rows = _table_rows(text)
    if text.engram_num_embeddings != rows:
        expected = f"{list(rows)}, the sums of the primes from engram_vocab_size = {text.engram_vocab_size} on"
        yield _fault("text_config.engram_num_embeddings", text.engram_num_embeddings, expected)


def _table_rows(text: Any) -> tuple[int, ...]:
    """Rows of each Engram table, which the hash constants fix."""
    from deepinfer.reference.engram import derive_constants  # imports torch, which reading other keys does not need

    constants = derive_constants(
        text.engram_layer_ids,
        text.engram_vocab_size,
        text.engram_max_ngram_size,
        text.engram_n_heads,
        text.engram_compressed_vocab_size,
    )
    return tuple(constants[layer].num_rows for layer in text.engram_layer_ids)


def _ascending(ids: Sequence[int]) -> bool:
    return all(left < right for left, right in pairwise(ids))


def _within(ids: Sequence[int], layers: int) -> bool:
    return all(layer < layers for layer in ids)
