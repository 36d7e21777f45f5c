"""Builds a byte-level BPE tokenizer without any training text: every byte, a few merges, special and reserved tokens.

Used for random checkpoints and for a dummy model without files. It has the spellings of the release's special tokens,
so every rule about them applies to it, and exactly as many Engram classes as a configuration asks for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from deepinfer.errors import ConfigError

BOS = "<｜begin▁of▁sentence｜>"
EOS = "<｜end▁of▁sentence｜>"
PAD = "<｜▁pad▁｜>"
IMAGE = "<｜deepseek_image｜>"
USER, ASSISTANT, SYSTEM, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜System｜>", "<｜latest_reminder｜>"
THINK, END_THINK, DSML = "<think>", "</think>", "｜DSML｜"
NAMED = (USER, ASSISTANT, SYSTEM, REMINDER, IMAGE, THINK, END_THINK, DSML)
MERGES = "t h|th e|T h|Th e|Ġ the|Ġ The|i n|a n|an d|Ġ and|Ġ a|Ġ in|Ġ Ġ|Ċ Ċ|i s|Ġ is"
TAIL = 16
"""The named tokens begin this many ids before the end of the vocabulary."""
SPECIAL_LIMIT = 2048
"""Reserved tokens beyond so many are plain vocabulary entries: matching special tokens in text costs per token."""
RESERVED = "reserved"
CASINGS = 2 ** len(RESERVED)
"""Spellings of a reserved token that fall into one class."""
SHARED_CLASSES = 39
"""Classes that the fixed tokens lose to case and white space: 512 ids give 473 classes."""


def build_byte_tokenizer(vocab_size: int, classes: int | None = None, image_id: int | None = None) -> Tokenizer:
    """A tokenizer of `vocab_size` ids.

    `classes` is the wanted size of the compressed vocabulary (default: all reserved tokens distinct), `image_id` the id
    of the image placeholder (default: among the named tokens at the end). Raises ConfigError where they cannot be met.
    """
    merges = [(left, right) for left, _, right in (pair.partition(" ") for pair in MERGES.split("|"))]
    fixed = [*byte_symbols(), *("".join(pair) for pair in merges)]
    tokens: list[str | None] = [None] * vocab_size
    reserved = vocab_size - 3 - len(fixed) - len(NAMED)
    if reserved < 0:
        raise ConfigError(f"vocab_size: found {vocab_size}, expected at least {vocab_size - reserved}")
    tokens[:3] = BOS, EOS, PAD
    _place_named(tokens, image_id)
    free = iter([index for index, token in enumerate(tokens) if token is None])
    extra = list(_reserved_names(reserved, _repeats(vocab_size, reserved, classes)))
    for index, token in zip(free, [*fixed, *extra], strict=True):
        tokens[index] = token
    vocabulary = [token for token in tokens if token is not None]
    return _assemble(vocabulary, merges, [BOS, EOS, PAD, *NAMED, *extra[:SPECIAL_LIMIT]])


def byte_symbols() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE, in byte order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def _place_named(tokens: list[str | None], image_id: int | None) -> None:
    """The image placeholder where it is wanted, the other names from `TAIL` before the end on."""
    start = len(tokens) - TAIL
    image_id = start + NAMED.index(IMAGE) if image_id is None else image_id
    if tokens[image_id] is not None:
        raise ConfigError(f"image_token_id: found {image_id}, which is {tokens[image_id]}, expected an id of its own")
    tokens[image_id] = IMAGE
    free = (index for index in range(start, len(tokens)) if tokens[index] is None)
    for name in NAMED:
        if name != IMAGE:
            tokens[next(free)] = name


def _repeats(vocab_size: int, reserved: int, classes: int | None) -> int:
    """How many reserved tokens must share a class with another one, so that `classes` remain."""
    most = vocab_size - SHARED_CLASSES
    if classes is None:
        return 0
    fewest = most - (reserved - -(-reserved // CASINGS))
    if not fewest <= classes <= most:
        expected = f"{fewest} to {most} with the {vocab_size} tokens of a generated tokenizer"
        raise ConfigError(f"text_config.engram_compressed_vocab_size: found {classes}, expected {expected}")
    return most - classes


def _reserved_names(count: int, repeats: int) -> Iterator[str]:
    """Distinct names, then `repeats` names that differ from earlier ones in case only and so share their class."""
    distinct = count - repeats
    for number in range(distinct):
        yield f"<｜{RESERVED}_{number:03d}｜>"
    for number in range(repeats):
        yield f"<｜{_cased(RESERVED, 1 + number // distinct)}_{number % distinct:03d}｜>"


def _cased(word: str, mask: int) -> str:
    """The word with the letters of the bit mask in upper case."""
    return "".join(letter.upper() if mask >> place & 1 else letter for place, letter in enumerate(word))


def _assemble(tokens: Sequence[str], merges: Sequence[tuple[str, str]], special: Sequence[str]) -> Tokenizer:
    model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=list(merges))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer
