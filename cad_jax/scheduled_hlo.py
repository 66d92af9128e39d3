"""XLA's compiled program as text (`compiled.as_text()`), read as far as predictions need it: the arrays every
instruction reads and writes, the products it computes, who takes part in a collective, where it came from.

HLO has no published grammar; what is not understood is refused here, never guessed.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)
_BITS = {"pred": 8, "bf16": 16, "token": 0, "opaque": 0}
_SLICES = ("dynamic-slice", "slice", "gather")
_IN_PLACE = ("dynamic-update-slice", "scatter")
_VIEWS = ("bitcast", "reshape", "get-tuple-element")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_HEADER = re.compile(r"^(?:ENTRY )?%?([\w.-]+) .*-> .*\{$")
# Parts of an op_name that say how the program was transformed, not where it came from.
_PLUMBING = re.compile(
    r"\w*jvp|transpose|while|body|cond|branch_\d+_fun|eval_jaxpr|shard_map|checkpoint|closed_call"
    r"|rematted_computation|custom_[jv]+p_call\w*"
)


class Array(NamedTuple):
    """Element type and sizes of one array."""

    dtype: str
    dims: tuple[int, ...]

    @property
    def bytes(self) -> int:
        bits = _BITS.get(self.dtype)
        if bits is None:
            bits = int(re.sub(r"^[a-z]+(\d+).*$", r"\1", self.dtype))
        return -(-math.prod(self.dims) * bits // 8)


@dataclass(frozen=True)
class Instruction:
    """One line of a computation. `results` are the arrays of its (flattened) result."""

    name: str
    opcode: str
    results: tuple[Array, ...]
    operands: tuple[str, ...]
    attributes: str  # all that follows the operands
    is_root: bool

    def attribute(self, name: str) -> str | None:
        """The value of `name=value` where value is a word or a computation's name."""
        match = re.search(rf"\b{name}=%?([\w.-]+)", self.attributes)
        return match[1] if match else None

    @property
    def op_name(self) -> str:
        """The name JAX gave it: transformations, named scopes, the primitive."""
        match = re.search(r'op_name="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def scopes(self) -> tuple[str, ...]:
        """The parts of op_name without brackets and jitted functions' names: scopes, transformations, primitive."""
        return tuple(
            p for p in re.split(r"[/()]+", re.sub(r"\bjit\([^()]*\)", "", self.op_name)) if p
        )

    @property
    def trip_count(self) -> int | None:
        """How often a loop runs, where that is known."""
        match = re.search(r'known_trip_count":\{"n":"(\d+)"', self.attributes)
        return int(match[1]) if match else None

    @property
    def custom_call_target(self) -> str:
        match = re.search(r'custom_call_target="([^"]*)"', self.attributes)
        return match[1] if match else ""

    @property
    def is_product(self) -> bool:
        """Whether it is a matrix product of the vendor's library."""
        return "matmul" in self.custom_call_target or "gemm" in self.custom_call_target

    @property
    def collective(self) -> str | None:
        """all-gather, ...: the kind, whether it starts one or does it in place."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None


class HloModule:
    """A scheduled module. Raises ValueError for text that is none."""

    def __init__(self, text: str) -> None:
        if "is_scheduled=true" not in text.partition("\n")[0]:
            raise ValueError("this text is no scheduled HLO module: pass `compiled.as_text()`")
        self.computations: dict[str, dict[str, Instruction]] = {}
        self._tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] | None = None
        computation: dict[str, Instruction] | None = None
        for line in text.splitlines()[1:]:
            if computation is not None:
                if line.startswith("}"):
                    computation = None
                else:
                    instruction = _parse(line)
                    computation[instruction.name] = instruction
            elif match := _HEADER.match(line):
                computation = self.computations.setdefault(match[1], {})
            elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
                table = self._tables.setdefault(line, {})
            elif table is not None and line:
                number, _, value = line.partition(" ")
                table[int(number)] = value

    @cached_property
    def _owner(self) -> Mapping[str, str]:
        """Computation of each instruction."""
        return {name: c for c, body in self.computations.items() for name in body}

    def find(self, name: str) -> Instruction | None:
        """The instruction of that name anywhere in the module."""
        owner = self._owner.get(name)
        return None if owner is None else self.computations[owner][name]

    def operand_arrays(self, instruction: Instruction) -> list[tuple[Array, ...]]:
        """The arrays of each operand."""
        body = self.computations[self._owner[instruction.name]]
        return [body[name].results for name in instruction.operands]

    def called(self, instruction: Instruction) -> dict[str, Instruction]:
        """Instructions of the computation that a fusion runs; none for anything else."""
        return self.computations.get(instruction.attribute("calls") or "", {})

    def functions(self, instruction: Instruction) -> list[str]:
        """Python functions that made it, outermost first, as far as the module says."""
        frame = re.search(r"\bstack_frame_id=(\d+)", instruction.attributes)
        found: list[str] = []
        number = int(frame[1]) if frame else 0
        while number in self._tables.get("StackFrames", {}):
            fields = dict(re.findall(r"(\w+)=(\d+)", self._tables["StackFrames"][number]))
            place = self._tables["FileLocations"][int(fields["file_location_id"])]
            function = dict(re.findall(r"(\w+)=(\d+)", place))["function_name_id"]
            found.append(self._tables["FunctionNames"][int(function)].strip('"'))
            number = int(fields["parent_frame_id"]) - 1  # stored from 1 on, 1 for none
        return found[::-1]

    def where(self, instruction: Instruction) -> str:
        """Where it came from: named scopes and the primitive; without scopes, the Python functions and that."""
        parts = [s for s in instruction.scopes if not _PLUMBING.fullmatch(s) and ":" not in s]
        if len(parts) > 1:
            return "/".join(parts)
        functions = [f for f in self.functions(instruction) if "<" not in f.rpartition(".")[2]]
        return " > ".join(functions[-2:] + parts) or instruction.name

    def product_flops(self, instruction: Instruction) -> int:
        """FLOPs of the matrix products it computes."""
        if instruction.is_product:
            summed = re.search(r'lhs_contracting_dimensions":\[([^\]]*)\]', instruction.attributes)
            return self._dot_flops(instruction, summed[1].replace('"', "") if summed else None)
        if instruction.opcode == "dot":
            summed = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
            return self._dot_flops(instruction, summed[1] if summed else None)
        return sum(self.product_flops(inner) for inner in self.called(instruction).values())

    def _dot_flops(self, product: Instruction, summed: str | None) -> int:
        if summed is None:
            raise ValueError(f"{product.name} is a product whose dims this text does not give")
        left = self.operand_arrays(product)[0][0]
        depth = math.prod(left.dims[int(dim)] for dim in summed.split(",") if dim)
        return 2 * math.prod(product.results[0].dims) * depth

    def traffic_bytes(self, instruction: Instruction) -> int:
        """Bytes it must read and write: of an array of which it takes or replaces a part, that part."""
        body = self.called(instruction)
        if not body:
            arrays = self.operand_arrays(instruction)
            if instruction.opcode in _SLICES:
                return 2 * _bytes(instruction.results)
            if instruction.opcode == "dynamic-update-slice":
                return 2 * _bytes(arrays[1])
            return sum(_bytes(a) for a in arrays) + _result_bytes(instruction)
        users = _users(body)
        read = sum(_read_bytes(n, body, users) for n, i in body.items() if i.opcode == "parameter")
        return read + sum(_written_bytes(n, body) for n, i in body.items() if i.is_root)

    def groups(self, instruction: Instruction, devices: int) -> list[tuple[int, ...]]:
        """Which devices take part together; pairs (source, target) of a collective-permute."""
        text = instruction.attributes
        if match := re.search(
            r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]+\},?)*)\}", text
        ):
            listed = re.findall(r"\{([\d,]+)\}", match[1])
            return [tuple(map(int, g.split(","))) for g in listed] or [tuple(range(devices))]
        order = np.arange(devices)
        if match := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
            rows, grid = (tuple(map(int, match[i].split(","))) for i in (1, 2))
            order = order.reshape(grid)
            order = order.transpose([int(d) for d in match[3].split(",")]) if match[3] else order
            return [tuple(row) for row in order.reshape(rows).tolist()]
        if match := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", text):
            axes = dict(re.findall(r"'(\w+)'=(\d+)", match[1]))
            chosen = re.findall(r"'(\w+)'", match[2])
            if "device_ids" not in match[1] and ":" not in match[2]:
                names = list(axes)
                order = order.reshape([int(size) for size in axes.values()])
                kept = [names.index(axis) for axis in chosen]
                order = np.moveaxis(order, kept, range(-len(kept), 0))
                size = math.prod(int(axes[axis]) for axis in chosen)
                return [tuple(row) for row in order.reshape(-1, size).tolist()]
        raise ValueError(
            f"the devices of {instruction.name} are given in a form this version cannot read: "
            f"{re.search('replica_groups=.{0,80}', text)}"
        )


def _parse(line: str) -> Instruction:
    """`  ROOT %name = shape opcode(operands), attributes`."""
    name, _, rest = line.strip().partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    opening = rest.index("(", end)
    closing = _closing(rest, opening)
    shape, opcode, operands = rest[:end], rest[end:opening].strip(), rest[opening + 1 : closing]
    return Instruction(
        name=name.removeprefix("ROOT ").removeprefix("%"),
        opcode=opcode,
        results=tuple(
            Array(dtype, tuple(map(int, dims.split(","))) if dims else ())
            for dtype, dims in _ARRAY.findall(shape)
        ),
        operands=tuple(re.findall(r"%([\w.-]+)", operands)),
        attributes=rest[closing + 1 :],
        is_root=name.startswith("ROOT "),
    )


def _closing(text: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`."""
    depth = 0
    for at in range(opening, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at
    raise ValueError(f"a bracket never closes in {text[:80]!r}")


def _bytes(arrays: tuple[Array, ...]) -> int:
    return sum(array.bytes for array in arrays)


def _result_bytes(instruction: Instruction) -> int:
    """Without the workspace that a library's product lists behind its result."""
    return _bytes(instruction.results[:1] if instruction.is_product else instruction.results)


def _users(body: Mapping[str, Instruction]) -> dict[str, list[Instruction]]:
    users: dict[str, list[Instruction]] = {name: [] for name in body}
    for instruction in body.values():
        for operand in dict.fromkeys(instruction.operands):
            users[operand].append(instruction)
    return users


def _read_bytes(name: str, body: Mapping[str, Instruction], users: dict) -> int:
    """Bytes of the array `name` that a fused computation needs."""
    whole, needed = _bytes(body[name].results), 0
    for user in users[name]:
        first = user.operands[0] == name
        if user.opcode in _SLICES and first:
            needed += _bytes(user.results)
        elif user.opcode in _VIEWS:
            needed += _read_bytes(user.name, body, users)
        elif not (user.opcode in _IN_PLACE and first):
            return whole
    return whole if body[name].is_root else min(whole, needed)


def _written_bytes(name: str, body: Mapping[str, Instruction]) -> int:
    """Bytes that a fused computation writes for the result `name`."""
    instruction = body[name]
    if instruction.opcode in (*_VIEWS, "tuple"):
        return sum(_written_bytes(operand, body) for operand in instruction.operands)
    if instruction.opcode == "dynamic-update-slice":
        return _bytes(body[instruction.operands[1]].results)
    if instruction.opcode == "scatter":
        return _bytes(body[instruction.operands[-1]].results)
    return _result_bytes(instruction)
