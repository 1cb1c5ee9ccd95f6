"""Layers are grouped as vLLM groups them: which share a block table, and what one block then takes."""

from dataclasses import replace

import pytest

from kvheadroom.capacity.kv_groups import (
    CannotGroupError,
    KvGroup,
    bytes_per_block,
    group_layers,
)
from kvheadroom.capacity.kv_specs import Kind, KvSpec, RequestShape
from tests.capacity.truth import BY_ID, layout_of

FULL = KvSpec(kind=Kind.FULL, block_size=16, unit_bytes=1024)
WINDOW = KvSpec(kind=Kind.WINDOW, block_size=16, unit_bytes=1024, window=128)
LATENT = KvSpec(kind=Kind.LATENT, block_size=16, unit_bytes=1152)
STATE = KvSpec(
    kind=Kind.STATE,
    block_size=16,
    unit_bytes=10_000,
    padded_bytes=16_384,
    request_blocks=2,
    dcp_sharded=False,
)


def group(
    *specs: KvSpec, block_outermost: bool = False, promote_windows: bool = False
) -> tuple[KvGroup, ...]:
    return group_layers(
        specs, block_outermost=block_outermost, promote_windows=promote_windows, largest_kind_factor=1.5
    )


def sizes(groups: tuple[KvGroup, ...]) -> list[int]:
    return [len(one.layers) for one in groups]


@pytest.mark.parametrize(
    ("windows", "full", "expected"),
    [
        # gpt-oss: as many of each
        (12, 12, [12, 12]),
        # ... with one layer more, of a draft: the smaller group is padded
        (12, 13, [12, 13]),
        # Padded while the larger kind is less than 1.5 times the smaller ...
        (10, 14, [10, 14]),
        (14, 10, [14, 10]),
        # ... and cut into groups of the smaller from there on
        (10, 15, [10, 8, 7]),
        (15, 10, [8, 7, 10]),
        (10, 16, [10, 8, 8]),
        # Gemma's 5:1, with 62, 34 and 30 layers: the last groups are padded
        (52, 10, [9, 9, 9, 9, 8, 8, 10]),
        (29, 5, [5, 5, 5, 5, 5, 4, 5]),
        (25, 5, [5, 5, 5, 5, 5, 5]),
        (1, 1, [1, 1]),
        (3, 1, [1, 1, 1, 1]),
    ],
)
def test_kinds_of_layers_are_cut_into_equal_groups(windows: int, full: int, expected: list[int]) -> None:
    groups = group(*[WINDOW] * windows, *[FULL] * full)
    assert sizes(groups) == expected
    assert all(len(one.distinct) == 1 for one in groups)
    # A block holds the widest group, whatever the others leave unused.
    assert bytes_per_block(groups, block_outermost=False) == max(expected) * 16_384
    assert sorted(layer for one in groups for layer in one.layers) == list(range(windows + full))


def test_a_group_takes_every_nth_layer_so_that_each_stage_has_some() -> None:
    groups = group(*[WINDOW] * 6, *[FULL] * 2)
    assert [one.layers for one in groups] == [(0, 3), (1, 4), (2, 5), (6, 7)]
    first = [one.of_stage(range(3)) for one in groups]
    assert [one.layers for one in first] == [(0,), (1,), (2,), ()]
    assert bytes_per_block(first, block_outermost=False) == 16_384


def test_equal_layers_and_layers_that_hold_every_token_are_one_group() -> None:
    assert sizes(group(*[FULL] * 7)) == [7]
    # DeepSeek's sparse attention: vectors of 576 bytes in all layers, keys of 132 in some: pages of both sizes
    vectors, keys = replace(LATENT, unit_bytes=576), replace(LATENT, unit_bytes=132, identity=("indexer",))
    groups = group(*[vectors] * 78, *[keys] * 21)
    assert sizes(groups) == [99]
    assert bytes_per_block(groups, block_outermost=False) == 16 * (576 * 78 + 132 * 21)
    assert groups[0].blocks(33, RequestShape()) == 3


def test_layers_with_different_windows_are_different_kinds() -> None:
    assert sizes(group(*[WINDOW] * 4, *[replace(WINDOW, window=256)] * 4)) == [4, 4]


def test_without_the_hybrid_manager_windows_keep_every_token() -> None:
    groups = group(*[WINDOW] * 4, *[FULL] * 3, promote_windows=True)
    assert sizes(groups) == [7]
    assert groups[0].blocks(100_000, RequestShape(in_flight_tokens=16)) == 6250
    # Without a layer that holds every token, there is nothing to promote them to.
    assert group(*[WINDOW] * 4, promote_windows=True)[0].blocks(100_000, RequestShape()) == 9
    with pytest.raises(CannotGroupError, match="hybrid KV cache manager"):
        group(*[STATE] * 4, *[FULL] * 4, promote_windows=True)


def test_a_page_that_divides_the_largest_holds_more_tokens() -> None:
    # Gemma 4: 10 full layers with half the bytes per token of the 50 windows
    groups = group(*[WINDOW] * 50, *[replace(FULL, unit_bytes=512)] * 10)
    assert sizes(groups) == [10] * 6
    assert {one.block_size for one in groups[:5]} == {16}
    assert groups[5].block_size == 32
    assert bytes_per_block(groups, block_outermost=False) == 10 * 16_384


def test_a_page_that_does_not_divide_the_largest_is_padded_but_for_latent_vectors() -> None:
    # MiMo: K of 192 and V of 128 beside windows with another number of heads
    groups = group(*[WINDOW] * 2, *[replace(FULL, unit_bytes=640)] * 2)
    assert [one.block_size for one in groups] == [16, 16]
    assert [one.specs[0].page_bytes for one in groups] == [16_384, 16_384]
    with pytest.raises(CannotGroupError, match="equally large"):
        group(*[STATE] * 2, *[replace(LATENT, unit_bytes=640)] * 2)


def test_windows_that_cannot_share_pages_with_latent_vectors_keep_every_token() -> None:
    groups = group(*[WINDOW] * 2, *[replace(LATENT, unit_bytes=640)] * 2)
    assert sizes(groups) == [4]
    assert bytes_per_block(groups, block_outermost=False) == 16 * 2 * (1024 + 640)


# GLM-5.3-Flash on 2 GPUs with an fp8 cache: 34 layers with a state, 11 with a vector of 512 bytes, a key of 132 for 4
# tokens and a ring; multi-token prediction adds a twelfth of these and doubles the ring.
@pytest.mark.parametrize(
    ("attention_layers", "block_size", "ring_tokens", "expected", "block_bytes"),
    [
        (11, 4352, 4, [9, 9, 8, 8, 22, 11], 26_492_928),
        (12, 4480, 8, [12, 11, 11, 24, 12], 29_736_960),
    ],
)
def test_packed_groups_are_as_wide_as_what_holds_every_token(
    attention_layers: int, block_size: int, ring_tokens: int, expected: list[int], block_bytes: int
) -> None:
    latent = KvSpec(kind=Kind.LATENT, block_size=block_size, unit_bytes=512, stride_bytes=32 * 512)
    keys = KvSpec(
        kind=Kind.LATENT, block_size=block_size, unit_bytes=132, tokens_per_unit=4, stride_bytes=64 * 132
    )
    state = replace(STATE, block_size=block_size, padded_bytes=block_size * 512)
    ring = KvSpec(kind=Kind.RING, block_size=ring_tokens, unit_bytes=512, request_blocks=1, dcp_sharded=False)
    groups = group(*[state] * 34, *[keys, ring, latent] * attention_layers, block_outermost=True)
    assert sorted(sizes(groups)) == sorted(expected)
    assert bytes_per_block(groups, block_outermost=True) == block_bytes
    # Each kind of group has layers of one kind, or vectors and keys in pairs.
    assert all(len(one.distinct) == (2 if latent in one.distinct else 1) for one in groups)
    shape = RequestShape()
    assert sum(one.blocks(1, shape) for one in groups) == sum(one.blocks(block_size, shape) for one in groups)


def test_packed_pages_of_one_size_are_grouped_as_everywhere() -> None:
    assert sizes(group(*[WINDOW] * 3, *[FULL], block_outermost=True)) == [1, 1, 1, 1]


def test_blocks_lie_whole_steps_apart() -> None:
    odd = replace(FULL, unit_bytes=1000, stride_bytes=4096)
    (one,) = group(odd, odd)
    # 16,000 B per layer and block: each layer is rounded up, or the whole block is.
    assert bytes_per_block([one], block_outermost=False) == 2 * 16_384
    assert bytes_per_block([one], block_outermost=True) == 32_768
    (three,) = group(odd, odd, odd)
    assert bytes_per_block([three], block_outermost=False) == 3 * 16_384
    assert bytes_per_block([three], block_outermost=True) == 49_152


# (tokens of a block, layers) of each group, and bytes of a block, as vLLM's own planning printed them.
@pytest.mark.parametrize(
    ("row", "groups", "block_bytes"),
    [
        ("gpt-oss-20b-tp1", [(16, 12), (16, 12)], 393_216),
        ("gpt-oss-120b-tp8-b200", [(16, 18), (16, 18)], 73_728),
        ("ministral-8b-2410-interleaved", [(16, 9)] * 4, 589_824),
        ("gemma3-27b-tp2-mnbt2048", [(16, 9)] * 4 + [(16, 8)] * 2 + [(16, 10)], 655_360),
        ("gemma3-4b-mm-tp1", [(16, 5)] * 5 + [(16, 4), (16, 5)], 327_680),
        ("gemma4-31b-tp2-h100", [(16, 10)] * 5 + [(32, 10)], 1_310_720),
        ("gemma4-31b-tp2-b200-fp8", [(64, 10)] * 5 + [(128, 10)], 2_621_440),
        ("gemma4-default-tp1-h100", [(32, 5)] * 5 + [(16, 5)], 655_360),
        ("mimo-v2-flash-tp4", [(32, 9)] + [(16, 8)] * 4 + [(16, 7)], 184_320),
        ("qwen35-35b-a3b-vl-tp2-mtp1-fp8", [(2112, 10)] * 3 + [(2112, 11)], 11_894_784),
        ("kimi-linear-48b-tp4", [(512, 7), (512, 7), (512, 6), (512, 7)], 4_128_768),
        ("lfm2-1.2b-tp1", [(16, 5), (16, 5), (16, 6)], 196_608),
        ("falcon-h1-7b-tp1", [(1568, 44), (1568, 44)], 70_647_808),
        ("whisper-large-v3", [(16, 32), (16, 32)], 2_621_440),
        (
            "glm53flash-b200-tp2-kvauto-mtp0",
            [(4352, 9), (4352, 9), (4352, 8), (4352, 8), (4352, 22), (4, 11)],
            26_492_928,
        ),
        (
            "glm53flash-b200-tp2-kvauto-mtp3",
            [(4480, 12), (4480, 11), (4480, 11), (4480, 24), (8, 12)],
            29_736_960,
        ),
        (
            "dsv4-flash-b200-tp4-kvauto",
            [(64, 22), (64, 21), (256, 62), (4, 42), (8, 20)],
            1_002_240,
        ),
        (
            "qwen4-exp-text-default-tp2",
            [(576, 10), (576, 10), (576, 10), (4, 10), (576, 20)],
            6_266_880,
        ),
    ],
)
def test_a_model_has_vllms_own_groups(row: str, groups: list[tuple[int, int]], block_bytes: int) -> None:
    layout = layout_of(BY_ID[row])
    assert [(one.block_size, len(one.layers)) for one in layout.groups] == groups
    assert layout.bytes_per_block == block_bytes
