"""Collectives and cycles are read from a program's text: kinds, bytes, trips of loops, branches, asynchronous pairs."""

import pytest

from mpo_jax.training.hlo import Traffic, collectives, estimated_cycles

LOOP = """
%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(f32[] %a, f32[] %b)
}

%inner (p: (f32[8,4], s32[])) -> (f32[8,4], s32[]) {
  %kernel = f32[8,4] custom-call(%x), backend_config={"custom_call_config": {
"xprof_metadata":"{\\"block_q\\": 512}"
}}, metadata={op_name="attention"}
  %gather = f32[8,4]{1,0:T(8,128)} all-gather(%x), channel_id=1, dimensions={0}
  %pair = (f32[], bf16[3]{0}) all-reduce(%y, %z), channel_id=2, to_apply=%add
}

%inner_condition (p: (f32[8,4], s32[])) -> pred[] {
  %limit = s32[]{:T(128)} constant(5), metadata={op_name="scan"}
  ROOT %less = pred[] compare(%counter, %limit), direction=LT
}

%outer (p: (f32[8,4], s32[])) -> (f32[8,4], s32[]) {
  %start = (bf16[2,4]{1,0}, bf16[2,4]{1,0}, u32[]{:S(2)}, u32[]) collective-permute-start(%x), channel_id=3
  %done = bf16[2,4]{1,0} collective-permute-done(%start)
  %loop = (f32[8,4], s32[]) while(%t), condition=%inner_condition, body=%inner
}

%outer_condition (p: (f32[8,4], s32[])) -> pred[] {
  ROOT %less = pred[] compare(%a, %b), direction=LT
}

%taken (p: f32[16]) -> f32[2] {
  ROOT %scatter = f32[2]{0} reduce-scatter(%p), channel_id=4, to_apply=%add
}

%idle (p: f32[16]) -> f32[2] {
  ROOT %zero = f32[2] constant({0, 0})
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %w = (f32[8]) while(%t), condition=%outer_condition, body=%outer, backend_config={"known_trip_count":{"n":"3"}}
  %c = f32[2] conditional(%flag, %u, %v), branch_computations={%idle, %taken}
  ROOT %r = f32[8,4] get-tuple-element(%w), index=0
}
"""


def test_loops_multiply_and_branches_count():
    """The outer loop 3 times, the inner 3·5: 15 · 8·4·4 bytes, 15 · (4 + 3·2), 3 · 2·4·2, and once 2·4 bytes."""
    assert collectives(LOOP) == {
        "all-gather": Traffic(15, 15 * 128),
        "all-reduce": Traffic(15, 15 * 10),
        "collective-permute": Traffic(3, 3 * 16),
        "reduce-scatter": Traffic(1, 8),
    }


def test_a_loop_of_unknown_length_with_a_collective_is_an_error():
    unknown = LOOP.replace(', backend_config={"known_trip_count":{"n":"3"}}', "")
    with pytest.raises(ValueError, match=r"loop condition outer_condition compares with \[\]"):
        collectives(unknown)


def test_a_program_on_one_device_moves_nothing():
    assert collectives("ENTRY %main (p: f32[2]) -> f32[2] {\n  ROOT %r = f32[2] add(%p, %p)\n}\n") == {}


def test_estimated_cycles_of_loops_are_multiplied():
    """7 outside, 3 trips of 11, in each of them 5 trips of 2: 7 + 3 · (11 + 5 · 2)."""
    text = LOOP
    for line, cycles in (("%zero = f32[2] constant({0, 0})", 1000), ("%kernel = f32[8,4] custom-call(%x)", 2)):
        text = text.replace(line, line + f', backend_config={{"window":{{"estimated_cycles":"{cycles}"}}}}')
    text = text.replace("collective-permute-start(%x)", 'collective-permute-start(%x), c={"estimated_cycles":"11"}')
    text = text.replace("get-tuple-element(%w)", 'get-tuple-element(%w), c={"estimated_cycles":"7"}')
    assert estimated_cycles(text) == 7 + 3 * (11 + 5 * 2)
