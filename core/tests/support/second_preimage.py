"""An attack on XXH3-128: other bytes with the same digest, found by algebra and not by search."""

from __future__ import annotations

import numpy as np

#: The first four words of XXH3's secret, which is a constant that everybody knows.
_SECRET = np.frombuffer(
    bytes.fromhex("b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"), dtype="<u8"
).tolist()
_64, _32 = (1 << 64) - 1, (1 << 32) - 1
_STRIPE = 8  # words


def second_preimage(content: bytes, first: int, second: int) -> bytes:
    """Bytes with the XXH3-128 of others, of which two words are chosen.

    In its long form the hash takes stripes of eight words. Word i of a stripe is added to sum
    ``i ^ 1``, and the product of the two halves of ``word ^ secret`` to sum i. Four words of the
    first three stripes put sums 0 and 1 right again, whatever the others are: where the lower
    half is made 1, the upper one is added to the lower half of a sum; where it is made 0,
    the word is added to the upper half of the other sum, and nothing else happens.

    Args:
        content: At least 512 bytes.
        first: For word 1 of the first stripe.
        second: For word 0 of the second stripe.
    """
    words = np.frombuffer(content, dtype="<u8").tolist()
    wanted = _sums(words)
    words[1], words[_STRIPE] = first, second
    free = {0: (0, 1), _STRIPE + 1: (1, 1), 2 * _STRIPE + 1: (1, 0), 2 * _STRIPE: (0, 0)}
    for place, (lane, lower) in free.items():  # upper halves are 0 for now
        words[place] = _key(place, lane) ^ lower
    for place, (lane, lower) in free.items():
        aim = lane if lower else lane ^ 1
        lack = (wanted[aim] - _sums(words)[aim]) & _64
        if lower:
            words[place] ^= (lack & _32) << 32
        else:
            assert not lack & _32
            words[place] = (words[place] + lack) & _64
    assert _sums(words) == wanted
    return np.array(words, dtype="<u8").tobytes()


def _key(place: int, lane: int) -> int:
    return int(_SECRET[place // _STRIPE + lane])


def _sums(words: list[int]) -> list[int]:
    """What the first three stripes add to sums 0 and 1."""
    sums = [0, 0]
    for stripe in range(3):
        for lane in (0, 1):
            word = words[stripe * _STRIPE + lane]
            mixed = word ^ _SECRET[stripe + lane]
            sums[lane] += (mixed & _32) * (mixed >> 32)
            sums[lane ^ 1] += word
    return [one & _64 for one in sums]
