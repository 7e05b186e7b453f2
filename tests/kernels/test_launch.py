"""Launch choices: complete tables, vocabularies covered once, buffers that hold any step."""

import pytest

from vllm_dspark.kernels.launch import (
    ARCHITECTURES,
    attention_launch,
    draft_launch,
    max_query_rows,
    rejection_parts,
    typical_device,
)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_shape_has_a_launch(arch):
    for head_dim in (64, 80, 96, 128, 192, 256):
        assert max_query_rows(arch, head_dim) >= 64
        for rows in (16, 32, 64):
            attention_launch(arch, rows, head_dim)
    with pytest.raises(ValueError, match="head_dim 512"):
        attention_launch(arch, 16, 512)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_vocabulary_is_covered_without_idle_programs(arch):
    device = typical_device(arch)
    for num_reqs in (1, 16, 17, 64, 65, 512):
        for rank in (16, 256, 512):
            for vocab in (32_000, 128_256, 151_936, 262_144):
                launch = draft_launch(arch, num_reqs, rank, 2)
                parts = launch.num_parts(num_reqs, vocab, device)
                tiles = -(-vocab // launch.block_v)
                per_part = -(-tiles // parts)
                assert parts * per_part >= tiles
                assert (parts - 1) * per_part < tiles, "the last program would have nothing to do"


def test_rejection_parts_grow_only_while_they_help():
    device = typical_device(90)
    assert rejection_parts(device, 512, 8, 151_936) == 1
    assert rejection_parts(device, 1, 8, 151_936) == 32
    assert rejection_parts(device, 1, 8, 5_000) == 1
