"""Writes the Engram class of every token of a tokenizer, which training needs and the tokenizer's files do not hold.

python train_vocabulary.py TOKENIZER_FOLDER OUT.npy
"""

from __future__ import annotations

import sys

import numpy as np

from deepinfer.hub.tokenizer import Tokenizer
from deepinfer.hub.vocabulary import compress_vocabulary


def main() -> int:
    folder, out = sys.argv[1:]
    mapping, classes = compress_vocabulary(Tokenizer(folder, "native"))
    np.save(out, mapping)
    print(f"{len(mapping)} tokens, {classes} classes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
