"""The readers of XLA's dumps: a real dump against facts counted by hand, small texts against arithmetic."""

from pathlib import Path

import numpy as np
import pytest

from cad_jax.scheduled_hlo import Array, HloModule
from cad_jax.thunks import load_dump, load_program, parse_thunks, phase

GOLDEN = Path(__file__).parent / "golden" / "thunks"
ROWS = WIDTH = 2048  # of compile_cases.mixed
BUFFER_BYTES = ROWS * WIDTH * 2


@pytest.fixture(scope="module")
def program():
    """compile_cases.mixed on a mesh pp 2, dp 4, tp 2 of 16 H200."""
    texts = ((GOLDEN / f"{n}.txt").read_text() for n in ("thunk_sequence", "thunk_metadata"))
    return load_program(*texts, (GOLDEN / "scheduled_hlo.txt").read_text(), 16)


def thunk(program, number):
    return next(t for top in program.thunks for t in top.walk() if t.number == number)


def test_order_and_nesting_of_a_real_dump(program) -> None:
    assert [t.number for t in program.thunks] == [1, 2, 3, 4]
    loop = program.thunks[3]
    assert program.role(loop) == "loop" and loop.instruction.trip_count == 3
    assert {name: len(ts) for name, ts in loop.sections.items()} == {"condition": 1, "body": 27}
    branch = thunk(program, 37)
    assert program.role(branch) == "branch"
    inside = {name: [t.number for t in ts] for name, ts in branch.sections.items()}
    assert inside == {"false_branch": [33, 34, 35], "true_branch": [36]}


def test_roles_of_a_real_dump(program) -> None:
    """One product, one attention kernel, four collectives of which XLA starts three asynchronously."""
    roles = {t.number: program.role(t) for top in program.thunks for t in top.walk()}
    assert [n for n, r in roles.items() if r == "done"] == [10, 26, 29]
    assert [n for n, r in roles.items() if r == "attention"] == [25]
    assert program.name(thunk(program, 25)) == "forward_kernel"
    assert program.direction(thunk(program, 25)) == "forward"
    assert roles[8] == "matmul" and thunk(program, 8).kind == "kDynamicSliceFusion"
    found = {n: program.collective(thunk(program, n)) for n in (6, 11, 27, 34)}
    assert found == {
        6: "all-to-all",
        11: "collective-permute",
        27: "all-reduce",  # a kernel in place of the library's collective
        34: "all-gather",
    }
    starts = {t.number: t for top in program.thunks for t in top.walk() if t.kind == "kAsyncStart"}
    assert sorted(starts) == [6, 11, 27]
    assert [starts[n].async_id for n in sorted(starts)] == [6, 11, 27]
    assert starts[6].stream == starts[11].stream == "communication_stream[0]"


def test_shapes_and_groups_of_a_real_dump(program) -> None:
    hlo, ranks = program.hlo, np.arange(16).reshape(2, 4, 2)
    exchange, send = thunk(program, 6).instruction, thunk(program, 11).instruction
    assert [a.bytes for arrays in hlo.operand_arrays(exchange) for a in arrays] == [BUFFER_BYTES]
    assert hlo.groups(exchange, 16) == [tuple(ranks[:, :, tp].ravel().tolist()) for tp in (0, 1)]
    assert hlo.groups(send, 16) == [(s, (s + 8) % 16) for i in range(8) for s in (i, i + 8)]
    (total,) = (i for i in hlo.called(thunk(program, 27).instruction).values() if i.collective)
    assert hlo.groups(total, 16) == [(i, i + 1) for i in range(0, 16, 2)]
    gather = thunk(program, 34).instruction
    assert hlo.groups(gather, 16) == [
        tuple(ranks[p, :, t].tolist()) for p in (0, 1) for t in (0, 1)
    ]
    product = thunk(program, 8).instruction
    assert hlo.product_flops(product) == 2 * ROWS * WIDTH * WIDTH
    # One slice of the stacked weights, the rows, the result: not the whole stack, no workspace.
    assert hlo.traffic_bytes(product) == pytest.approx(3 * BUFFER_BYTES, rel=1e-5)


def test_origins_of_a_real_dump(program) -> None:
    hlo = program.hlo
    assert hlo.where(thunk(program, 6).instruction) == "exchange/dispatch_fwd/hop1/all_to_all"
    assert phase(thunk(program, 6).instruction.scopes) == "forward"
    assert hlo.where(thunk(program, 11).instruction) == "pipeline/send_fwd/ppermute"
    assert hlo.functions(thunk(program, 6).instruction)[-2:] == ["mixed.<locals>.body", "_exchange"]
    gather = thunk(program, 34).instruction  # without a scope: the function that made it
    assert hlo.functions(gather)[-1] == "mixed.<locals>.body.<locals>.<lambda>"
    assert hlo.where(gather).endswith("mixed.<locals>.body > all_gather")
    assert phase(gather.scopes) == "other"


@pytest.mark.parametrize(
    "op_name, expected",
    [
        ("jit(step)/jvp()/while/body/all_gather", "forward"),
        ("jit(step)/jvp(layer)/all_gather", "forward"),
        ("jit(step)/transpose(jvp())/while/body/all_gather", "backward"),
        (
            "jit(step)/transpose(jvp())/checkpoint/rematted_computation/exchange/dispatch_fwd",
            "backward",
        ),
        ("jit(step)/while/body/backward/jvp()/weights/gather", "backward"),
        ("jit(step)/while/body/exchange/combine_bwd/hop2/all_to_all", "backward"),
        ("jit(step)/while/body/pipeline/send_fwd/ppermute", "forward"),
        ("jit(forward)/psum", "other"),
    ],
)
def test_phase(op_name, expected) -> None:
    hlo = module(f'ROOT %x = f32[8]{{0}} all-reduce(%a), metadata={{op_name="{op_name}"}}')
    assert phase(hlo.find("x").scopes) == expected


def module(*lines: str, extra: str = "") -> HloModule:
    body = "\n".join(f"  {line}" for line in ("%a = f32[8]{0} parameter(0)", *lines))
    return HloModule(
        f"HloModule tiny, is_scheduled=true\n\n{extra}\nENTRY %main (a: f32[8]) -> f32[8] {{\n{body}\n}}\n"
    )


@pytest.mark.parametrize(
    "text, expected",
    [
        ("{{0,3},{1,2}}", [(0, 3), (1, 2)]),
        ("{}", [tuple(range(24))]),
        ("[2,12]<=[24]", [tuple(range(12)), tuple(range(12, 24))]),
        ("[12,2]<=[2,3,4]T(1,2,0)", [(i, i + 12) for i in range(12)]),
        (
            "mesh['pp'=2,'dp'=3,'tp'=4] {'dp'}",
            [tuple(12 * p + 4 * d + t for d in range(3)) for p in range(2) for t in range(4)],
        ),
        (
            "mesh['pp'=2,'dp'=3,'tp'=4] {'pp','dp'}",
            [tuple(12 * p + 4 * d + t for p in range(2) for d in range(3)) for t in range(4)],
        ),
        ("mesh['pp'=2,'dp'=3,'tp'=4] {'pp','dp','tp'}", [tuple(range(24))]),
    ],
)
def test_groups(text, expected) -> None:
    hlo = module(
        f"ROOT %x = f32[8]{{0}} all-reduce(%a), channel_id=1, replica_groups={text}, to_apply=%add"
    )
    assert hlo.groups(hlo.find("x"), 24) == expected


def test_unknown_groups_are_refused() -> None:
    text = "mesh['pp'=2,'dp'=3,'tp'=4] {'dp':(1)2}"
    hlo = module(f"ROOT %x = f32[8]{{0}} all-reduce(%a), replica_groups={text}")
    with pytest.raises(ValueError, match="devices of x are given in a form"):
        hlo.groups(hlo.find("x"), 24)


FUSED = """
%update (p0: f32[4,8], p1: f32[1,8], p2: s32[]) -> f32[4,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = f32[1,8]{1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %u = f32[4,8]{1,0} dynamic-update-slice(%p0, %p1, %p2, %p2)
}

%rows (p0.1: bf16[100,16], p1.1: s32[10,1]) -> (bf16[10,16], bf16[100,16]) {
  %p0.1 = bf16[100,16]{1,0} parameter(0)
  %p1.1 = s32[10,1]{1,0} parameter(1)
  %view = bf16[100,16]{1,0} bitcast(%p0.1)
  %g = bf16[10,16]{1,0} gather(%view, %p1.1), slice_sizes={1,16}
  %n = bf16[100,16]{1,0} broadcast(%p1.1)
  ROOT %t = (bf16[10,16]{1,0}, bf16[100,16]{1,0}) tuple(%g, %n)
}

%product (p0.2: bf16[64,32], p1.2: bf16[32,16]) -> f32[64,16] {
  %p0.2 = bf16[64,32]{1,0} parameter(0)
  %p1.2 = bf16[32,16]{1,0} parameter(1)
  ROOT %d = f32[64,16]{1,0} dot(%p0.2, %p1.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_bytes_and_products() -> None:
    hlo = module(
        "%s = f32[4,8]{1,0} constant({...})",
        "%one = f32[1,8]{1,0} constant({...})",
        "%i = s32[] constant(1)",
        "%table = bf16[100,16]{1,0} constant({...})",
        "%index = s32[10,1]{1,0} constant({...})",
        "%x = bf16[64,32]{1,0} constant({...})",
        "%w = bf16[32,16]{1,0} constant({...})",
        "%updated = f32[4,8]{1,0} fusion(%s, %one, %i), kind=kLoop, calls=%update",
        "%picked = (bf16[10,16]{1,0}, bf16[100,16]{1,0}) fusion(%table, %index), kind=kLoop, calls=%rows",
        "%y = f32[64,16]{1,0} fusion(%x, %w), kind=kCustom, calls=%product",
        '%z = (bf16[64,16]{1,0}, s8[99]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", '
        'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}',
        "%cut = f32[1,8]{1,0} dynamic-slice(%s, %i, %i), dynamic_slice_sizes={1,8}",
        "ROOT %c = f32[8]{0} copy(%a)",
        extra=FUSED,
    )
    traffic = {
        name: hlo.traffic_bytes(hlo.find(name)) for name in ("updated", "picked", "z", "cut", "c")
    }
    assert traffic == {
        "updated": 32 + 32 + 4,  # the row that is read, the row that is written, the index
        "picked": 10 * 16 * 2 + 10 * 4 + 10 * 16 * 2 + 100 * 16 * 2,
        "z": 2 * (64 * 32 + 32 * 16 + 64 * 16),
        "cut": 2 * 32,
        "c": 2 * 32,
    }
    flops = {name: hlo.product_flops(hlo.find(name)) for name in ("y", "z", "c")}
    assert flops == {"y": 2 * 64 * 32 * 16, "z": 2 * 64 * 32 * 16, "c": 0}


@pytest.mark.parametrize(
    "dtype, dims, size",
    [("bf16", (3, 5), 30), ("pred", (7,), 7), ("u8", (), 1), ("s4", (3,), 2), ("f8e4m3fn", (4,), 4),
     ("c64", (2,), 16), ("token", (), 0), ("f32", (0, 4), 0)],
)  # fmt: skip
def test_array_bytes(dtype, dims, size) -> None:
    assert Array(dtype, dims).bytes == size


def test_nested_loops_and_branches() -> None:
    """The titles of sections are indented in some places and not in others."""
    top = parse_thunks(
        """\
001: kWhile [source | sink]
condition:
    002: kCopy [source | sink] kCopy
  body:
    003: kConditional [source | sink]
      false_branch:
        004: kConditional [source | sink]
          false_branch:
            005: kCopy [source | sink] kCopy
          true_branch:
            006: kWhile [source | sink]
condition:
                007: kCopy [source | sink] kCopy
              body:
                008: kCopy [source | sink] kCopy
      true_branch:
        009: kCopy [source | sink] kCopy
1010: kCopy [source | sink] kCopy
"""
    )

    def shape(thunks):
        return [
            (t.number, {name: shape(inner) for name, inner in t.sections.items()}) for t in thunks
        ]

    inner_loop = (6, {"condition": [(7, {})], "body": [(8, {})]})
    inner_branch = (4, {"false_branch": [(5, {})], "true_branch": [inner_loop]})
    branch = (3, {"false_branch": [inner_branch], "true_branch": [(9, {})]})
    assert shape(top) == [(1, {"condition": [(2, {})], "body": [branch]}), (1010, {})]


def test_other_text_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="no scheduled HLO module"):
        HloModule("HloModule step, entry_computation_layout={}\n")
    with pytest.raises(ValueError, match="no thunk sequence of a known form: 'what is this'"):
        parse_thunks("001: kCopy [source | sink] kCopy\nwhat is this\n")
    with pytest.raises(ValueError, match="section 'body' outside any kWhile"):
        parse_thunks("001: kCopy [source | sink] kCopy\n  body:\n")
    with pytest.raises(ValueError, match="holds 0 thunk sequences.*jax 0.11 and 0.12 do"):
        load_dump(tmp_path, "", 16)
    with pytest.raises(ValueError, match="metadata is missing or of another program"):
        load_program(
            (GOLDEN / "thunk_sequence.txt").read_text(),
            "",
            (GOLDEN / "scheduled_hlo.txt").read_text(),
            16,
        )
