"""Bits per byte of `xz -9e` on the held-out files of the standard library, alone and primed with the training files.

    python benchmarks/xz_primed.py      # a minute

Primed: by how many bytes the compressed training files grow when the held-out ones are appended. xz's window of 64 MiB
holds all of them. What a language model's bits per byte are to be held against.
"""

import lzma

from datamodules import TextDataModule
from datamodules.splits import SPLITS


def compressed(data: bytes) -> int:
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME}]
    return len(lzma.compress(data, format=lzma.FORMAT_XZ, filters=filters))


def main() -> None:
    corpus, _ = TextDataModule()._corpus()
    texts: list[list[str]] = [[] for _ in SPLITS]
    for split, pieces in corpus.iterate():
        texts[split].append("".join(pieces))
    train, *held_out = ("\0".join(parts).encode() for parts in texts)
    base = compressed(train)
    for name, data in zip(SPLITS[1:], held_out, strict=True):
        alone, primed = (8 * n / len(data) for n in (compressed(data), compressed(train + data) - base))
        print(f"{name}: {len(data):,} bytes, alone {alone:.3f}, primed {primed:.3f} bits per byte")


if __name__ == "__main__":
    main()
