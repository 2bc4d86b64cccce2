"""Packing: every sequence in one bin, the bound holds, first fit decreasing is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_core.batch import pack
from rl_core.errors import ConfigError, DataError

CAPACITY = 24
LENGTHS = st.lists(st.integers(1, CAPACITY), max_size=60)


def naive_first_fit(lengths: list[int], order: list[int], capacity: int) -> list[list[int]]:
    """The textbook scan over all bins, as an oracle."""
    bins: list[list[int]] = []
    room: list[int] = []
    for row in order:
        target = next((i for i, left in enumerate(room) if left >= lengths[row]), len(bins))
        if target == len(bins):
            bins.append([])
            room.append(capacity)
        bins[target].append(row)
        room[target] -= lengths[row]
    return bins


def naive_modified_first_fit_decreasing(lengths: list[int], capacity: int) -> list[list[int]]:
    """The published steps over plain lists, as an oracle."""
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    bins = [[row] for row in order if 2 * lengths[row] > capacity]
    rest = order[len(bins) :]
    medium = [row for row in rest if 3 * lengths[row] > capacity]
    small = [row for row in rest if 3 * lengths[row] <= capacity < 6 * lengths[row]]

    def room(members: list[int]) -> int:
        return capacity - sum(lengths[row] for row in members)

    def largest(pool: list[int], limit: int) -> int | None:
        fitting = [row for row in pool if lengths[row] <= limit]
        return min(fitting, key=lambda row: (-lengths[row], row), default=None)

    for members in bins:
        if (row := largest(medium, room(members))) is not None:
            medium.remove(row)
            rest.remove(row)
            members.append(row)
    for members in reversed([members for members in bins if len(members) == 1]):
        if not small:
            break
        least = min(small, key=lambda row: (lengths[row], row))
        small.remove(least)
        if (most := largest(small, room(members) - lengths[least])) is None:
            break
        small.remove(most)
        members += [least, most]
        rest = [row for row in rest if row not in members]
    for members in bins:
        while (row := largest(rest, room(members))) is not None:
            rest.remove(row)
            members.append(row)
    return bins + naive_first_fit(lengths, rest, capacity)


@given(lengths=LENGTHS)
def test_first_fit_decreasing_gives_the_bins_of_the_naive_scan(lengths):
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    expected = naive_first_fit(lengths, order, CAPACITY)
    assert pack(lengths, CAPACITY, "first_fit_decreasing") == expected


@given(lengths=LENGTHS, seed=st.integers(0, 1000))
def test_first_fit_shuffle_gives_the_bins_of_the_naive_scan_in_seeded_order(lengths, seed):
    order = np.random.default_rng(seed).permutation(len(lengths)).tolist()
    expected = naive_first_fit(lengths, order, CAPACITY)
    assert pack(lengths, CAPACITY, "first_fit_shuffle", seed=seed) == expected


@given(lengths=LENGTHS)
def test_concatenative_gives_the_bins_of_the_naive_scan(lengths):
    bins: list[list[int]] = []
    for row, length in enumerate(lengths):
        if not bins or sum(lengths[other] for other in bins[-1]) + length > CAPACITY:
            bins.append([])
        bins[-1].append(row)
    assert pack(lengths, CAPACITY, "concatenative") == bins


@given(lengths=LENGTHS | st.lists(st.integers(1, CAPACITY // 2), max_size=60))
def test_modified_first_fit_decreasing_gives_the_bins_of_the_plain_steps(lengths):
    expected = naive_modified_first_fit_decreasing(lengths, CAPACITY)
    assert pack(lengths, CAPACITY, "modified_first_fit_decreasing") == expected


@pytest.mark.parametrize("asked", [{"bin_multiple": 3}, {"min_bin_count": 3}])
def test_fewer_sequences_than_bins_is_an_error(asked):
    with pytest.raises(DataError, match="3 bins were requested for 2 sequences, which need 1"):
        pack([5, 5], 10, **asked)


@pytest.mark.parametrize(
    "lengths",
    [[5, 1.5], [5.0, 2.0], [True, True], [[1, 2]], [[1], [1, 2]], ["5"], [None], [2**70], 5, None],
)
def test_lengths_that_are_no_integers_are_refused(lengths):
    with pytest.raises(DataError, match="lengths are"):
        pack(lengths, 10)


@pytest.mark.parametrize("kind", [np.uint8, np.int32, np.uint64])
def test_lengths_of_any_integer_width_are_packed(kind):
    assert pack(np.array([5, 6, 4], dtype=kind), 10, "concatenative") == [[0], [1, 2]]


def test_a_length_beyond_64_bits_signed_is_named_as_it_is():
    with pytest.raises(DataError, match=f"sequence 0 has {2**63 + 5} tokens"):
        pack(np.array([2**63 + 5], dtype=np.uint64), 10)


@pytest.mark.parametrize("bad", [0, -3, 11])
def test_a_length_outside_the_bin_is_named(bad):
    with pytest.raises(DataError, match=f"sequence 1 has {bad} tokens") as caught:
        pack([5, bad], 10)
    assert caught.value.details["row"] == 1


@pytest.mark.parametrize("algorithm", [None, 3, ["concatenative"], b"concatenative"])
def test_an_algorithm_that_is_no_name_is_refused(algorithm):
    with pytest.raises(ConfigError, match="unknown packing algorithm") as caught:
        pack([1], 2, algorithm)
    assert caught.value.details["key"] == "algorithm"


def test_an_unknown_algorithm_is_named_with_the_nearest():
    with pytest.raises(ConfigError, match="'concatenative'") as caught:
        pack([1], 2, "concatenate")
    assert caught.value.details["key"] == "algorithm"
