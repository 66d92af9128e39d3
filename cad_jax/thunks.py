"""What a compiled GPU program does, in order: XLA's dump of its thunk sequence joined with the scheduled HLO.

A thunk is one launch. The dump (`*.thunk_sequence.txt`) gives order, nesting and streams, and is what the run
time executes: the proof that a collective runs beside compute. It names kernels only; `*.thunk_metadata.txt`
gives each thunk's HLO instruction, and that its shapes and its origin.

    001: kCopy         [source | next=002 (1)] kCopy
    002: kWhile        [prev=001 (1) | sink]
    condition:
        003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] ...
      body:
        004: kAsyncStart [source | next=007 (3)] stream=communication_stream[0], async_id=4
            005: kAllToAll [source | sink] kAllToAll
        006: kCublasLtMatmul [source | sink] kCublasLtMatmul
        007: kAsyncDone [source | sink] async_id=4
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from cad_jax.scheduled_hlo import HloModule, Instruction

Role = Literal["collective", "matmul", "attention", "copy", "kernel", "loop", "branch", "done"]
Phase = Literal["forward", "backward", "other"]

_THUNK = re.compile(r"^( *)(\d+): (k\w+) +\[[^\]]*\] *(.*)$")
_SECTION = re.compile(r"^ *([a-z_]\w*):$")
_METADATA = re.compile(r'profile_annotation: "([^"]*)"\s+thunk_id: (\d+)')
_KERNEL = re.compile(r"^(\S+) grid: ")
_PALLAS_TARGETS = ("triton", "mosaic_gpu")


@dataclass
class Thunk:
    """One launch, or what holds others: a loop, a branch, an asynchronous part, a slice of a kernel's operands.

    `sections` are the thunks inside: "body" and "condition" of a loop, the branches of a
    conditional, "" for anything else.
    """

    number: int
    kind: str
    text: str
    instruction: Instruction | None = None
    sections: dict[str, list["Thunk"]] = field(default_factory=dict)

    @property
    def async_id(self) -> int | None:
        """Which asynchronous part this starts or ends."""
        match = re.search(r"\basync_id=(\d+)", self.text)
        return int(match[1]) if match else None

    @property
    def stream(self) -> str:
        match = re.search(r"\bstream=(\S+?),", self.text)
        return match[1] if match else ""

    @property
    def inside(self) -> list["Thunk"]:
        """Thunks of an asynchronous part or of a kernel with sliced operands."""
        return self.sections.get("", [])

    def walk(self) -> Iterator["Thunk"]:
        """It and all within."""
        yield self
        for section in self.sections.values():
            for thunk in section:
                yield from thunk.walk()


@dataclass(frozen=True)
class Program:
    """A compiled program of so many devices."""

    thunks: list[Thunk]
    hlo: HloModule
    devices: int

    def role(self, thunk: Thunk) -> Role:
        """What a thunk is to a reader of the schedule. Kernels written by hand are attention: there are no
        others; so are loops under the named scope "attention"."""
        if thunk.kind == "kWhile":
            scopes = thunk.instruction.scopes if thunk.instruction else ()
            return "attention" if "attention" in scopes else "loop"
        if thunk.kind == "kConditional":
            return "branch"
        if thunk.kind == "kAsyncDone":
            return "done"
        if self.collective(thunk) is not None:
            return "collective"
        instruction = thunk.instruction
        if instruction is not None:
            if any(t in instruction.custom_call_target for t in _PALLAS_TARGETS):
                return "attention"
            if self.hlo.product_flops(instruction):
                return "matmul"
        if thunk.inside:
            inner = [self.role(t) for t in thunk.inside]
            first: Role = "copy"
            for role in ("kernel", "matmul", "attention"):
                first = role if role in inner else first
            return first
        return "copy" if thunk.kind in ("kCopy", "kMemzero", "kMemset32BitValue") else "kernel"

    def collective(self, thunk: Thunk) -> str | None:
        """The kind of the collective that a thunk starts or does: its HLO opcode, or None."""
        instruction = thunk.instruction
        if instruction is not None:
            if instruction.collective is not None:
                return instruction.collective
            # XLA replaces some small ones within a node by a kernel: a fusion around the collective.
            inner = (i.collective for i in self.hlo.called(instruction).values())
            if found := next((kind for kind in inner if kind is not None), None):
                return found
        if thunk.kind in ("kWhile", "kConditional"):
            return None
        return next((k for k in map(self.collective, thunk.inside) if k is not None), None)

    def name(self, thunk: Thunk) -> str:
        """What it is called: a kernel's own name where it has one, else its instruction's."""
        instruction = thunk.instruction
        if instruction is None:
            return thunk.kind
        if instruction.custom_call_target and (match := _KERNEL.match(thunk.text)):
            return match[1]
        return instruction.name

    def direction(self, thunk: Thunk) -> Phase:
        """Whether an attention kernel computes outputs or gradients."""
        scopes = thunk.instruction.scopes if thunk.instruction else ()
        for scope in reversed(scopes):
            if scope.startswith("forward") or scope.startswith("flash_attention"):
                return "forward"
            if scope.startswith(("backward", "dq_", "dkv_")):
                return "backward"
        return phase(scopes)


def phase(scopes: Sequence[str]) -> Phase:
    """The pass an operation belongs to, from the parts of its op_name: what runs in the backward pass is
    backward, computing the forward again included."""
    if any(s in ("transpose", "backward") or s.endswith("_bwd") for s in scopes):
        return "backward"
    if any(s in ("jvp", "forward") or s.endswith("_fwd") for s in scopes):
        return "forward"
    return "other"


def parse_thunks(sequence: str) -> list[Thunk]:
    """The thunks of a `*.thunk_sequence.txt`, nested.

    Raises:
        ValueError: a line is of no known form.
    """
    top: list[Thunk] = []
    open_thunks: list[tuple[int, Thunk, str]] = []  # indentation, thunk, section that is read
    for line in sequence.splitlines():
        if match := _THUNK.match(line):
            depth, thunk = len(match[1]), Thunk(int(match[2]), match[3], match[4].strip())
            while open_thunks and open_thunks[-1][0] >= depth:
                open_thunks.pop()
            if open_thunks:
                _, parent, section = open_thunks[-1]
                parent.sections.setdefault(section, []).append(thunk)
            else:
                top.append(thunk)
            open_thunks.append((depth, thunk, ""))
        elif match := _SECTION.match(line):
            _enter(open_thunks, match[1])
        elif line.strip():
            raise ValueError(f"no thunk sequence of a known form: {line[:120]!r}")
    return top


def _enter(open_thunks: list[tuple[int, Thunk, str]], section: str) -> None:
    """Read on in another section of the innermost loop or conditional that can have it. (XLA indents
    some of these titles and not others.)"""
    kind = "kWhile" if section in ("condition", "body") else "kConditional"
    while open_thunks:
        depth, thunk, _ = open_thunks.pop()
        if thunk.kind == kind and section not in thunk.sections:
            thunk.sections[section] = []
            open_thunks.append((depth, thunk, section))
            return
    raise ValueError(f"a thunk sequence has a section {section!r} outside any {kind}")


def load_program(sequence: str, metadata: str, hlo: str, devices: int) -> Program:
    """The program of a thunk sequence, its metadata and the scheduled HLO, all as text.

    Raises:
        ValueError: one of them is not what it should be.
    """
    module = HloModule(hlo)
    names = {int(number): name for name, number in _METADATA.findall(metadata)}
    thunks = parse_thunks(sequence)
    for thunk in (t for top in thunks for t in top.walk()):
        thunk.instruction = module.find(names.get(thunk.number, ""))
    if thunks and not any(t.instruction for top in thunks for t in top.walk()):
        raise ValueError(
            "no thunk could be traced to its HLO instruction: the thunk metadata is missing or of "
            "another program"
        )
    return Program(thunks, module, devices)


def load_dump(folder: Path, hlo: str, devices: int) -> Program:
    """The one program that was dumped to a folder (option xla_dump_to).

    Raises:
        ValueError: the folder holds no thunk sequence, or several.
    """
    found = sorted(folder.glob("*.thunk_sequence.txt"))
    if len(found) != 1:
        raise ValueError(
            f"{folder} must hold the dump of one program, it holds {len(found)} thunk sequences: "
            "this version of XLA does not write what the report reads; jax 0.11 and 0.12 do"
        )
    metadata = found[0].with_name(found[0].name.replace("thunk_sequence", "thunk_metadata"))
    return load_program(
        found[0].read_text(), metadata.read_text() if metadata.exists() else "", hlo, devices
    )
