"""The tiles and programs that schedule ``fused`` chooses for GEMMs."""

from __future__ import annotations

import itertools

from ovpatch.overlap.tensor_parallel.triton_launch import (
    WIDE,
    choose_gather_tiles,
    choose_scatter_tiles,
)

# The programs that an H200 runs at a time.
PROGRAMS = 132


def test_more_programs_fetch_if_there_is_less_to_multiply():
    wide, narrow, none = (
        choose_gather_tiles(1024, 4096, [n] * (n > 0), 2, 8, PROGRAMS).pullers
        for n in (7168, 1792, 0)
    )
    assert wide < narrow < none < PROGRAMS / 2


def test_more_programs_fetch_from_more_ranks():
    assert (
        choose_gather_tiles(4096, 4096, [1792], 2, 2, PROGRAMS).pullers
        < choose_gather_tiles(1024, 4096, [1792], 2, 8, PROGRAMS).pullers
    )


def test_tiles_are_narrow_if_programs_have_few():
    few, many = (choose_gather_tiles(m, 4096, [1792], 2, 2, PROGRAMS) for m in (1024, 8192))
    assert (few.columns, many.columns) == (128, 256)


def test_gather_tiles_have_the_rows_for_which_workspaces_have_counts():
    for m, n, world in itertools.product((1, 100, 5000), (8, 3000), (2, 8)):
        assert choose_gather_tiles(m, 512, [n], 2, world, PROGRAMS).rows == WIDE.rows


def test_groups_are_small_if_the_cache_holds_the_weights():
    assert choose_scatter_tiles(4096, 1792, 2).group < choose_scatter_tiles(8192, 3584, 2).group
