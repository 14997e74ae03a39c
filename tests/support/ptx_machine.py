"""Runs the PTX of one cluster on numpy, and names races: what threads do to the same place in shared memory.

A race is two accesses to the same place by different threads of a CTA, at least one of them a write, with no barrier of
the CTA between them. Several threads may write the same number in one instruction. Only threads that have waited for
the mbarrier may read what `st.async` writes, and no thread may overwrite it. It may be sent to another CTA after a
barrier of the cluster. An access to global memory must lie in one tensor and be aligned. In each step, the threads with
the earliest next instruction run.

It knows what most kernels over another dimension have (`ptx_arithmetic` has the arithmetic), and raises an error for
anything else. An asynchronous copy arrives at once, so a missing `cp.async.wait` is not seen. It does not see what
ptxas makes of the PTX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ptx_arithmetic import Bits, evaluate, masked

LANES = 32
RANK = np.uint64(24)  # the bit of an address in a cluster where the CTA's rank begins
# what a thread waits for
RUNS, CTA, CLUSTER, ARRIVALS = range(4)
STATEMENT = re.compile(r"(?:@(!?)(%?\w+)\s+)?(\S+)\s*(.*)", re.DOTALL)
IGNORED = ("fence", "griddepcontrol", "cp.async.wait", "cp.async.commit", "nanosleep")
UNIT = 2  # bytes of shared memory that are watched as one
MULTIPROCESSORS = 132


class Instruction(NamedTuple):
    predicate: str | None
    negated: bool
    op: str
    operands: tuple[str, ...]


class Program(NamedTuple):
    """shared: the first byte and the bytes of each variable. parameters: their names."""

    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]
    shared: Mapping[str, tuple[int, int]]
    parameters: tuple[str, ...]
    threads: int


class Race(NamedTuple):
    """place: in the shared memory of the CTA, in units, or bytes for "other writes". thread: in the cluster."""

    kind: str
    instruction: Instruction
    place: int
    thread: int


def _operands(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip())


def parse(ptx: str, dynamic: int = 0) -> Program:
    """dynamic: bytes of shared memory that a launch adds, for Triton's own use or behind the kernel's one variable."""
    header, body = ptx[ptx.index(".visible .entry") :].split("{", 1)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    shared: dict[str, tuple[int, int]] = {}
    lines = (line.split("//")[0].strip() for line in body.split(".section")[0].splitlines())
    for statement in (part for line in lines if not line.startswith((".loc", ".pragma")) for part in line.split(";")):
        text = statement.strip()
        while label := re.match(r"([$\w]+):", text):
            labels[label[1]] = len(instructions)
            text = text[label.end() :].strip()
        text = text.removeprefix("{").removeprefix("}").strip()  # scopes
        if variable := re.match(r"\.shared \.align (\d+) \.b(\d+) (\w+)(?:\[(\d+)\])?", text):
            align, bits, name, n = int(variable[1]), int(variable[2]), variable[3], int(variable[4] or 1)
            end = max((first + size for first, size in shared.values()), default=0)
            shared[name] = (-(-end // align) * align, bits // 8 * n)
        elif text and not text.startswith("."):
            negated, predicate, op, rest = STATEMENT.match(text).groups()
            instructions.append(Instruction(predicate, negated == "!", op, _operands(rest)))
    end = max((first + size for first, size in shared.values()), default=0)
    if "global_smem" in body:
        shared["global_smem"] = (-(-end // 128) * 128, dynamic)
    elif dynamic:
        (name,) = shared
        shared[name] = (0, end + dynamic)
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
    names = re.findall(r"\.param [^\n]*?(\w+_param_\d+)", header)
    return Program(tuple(instructions), labels, shared, tuple(names), threads)


class Machine:
    """A cluster of so many CTAs, the `cluster`th of so many in its grid.

    parameters: a number for each of the program's. tensors: the address and the memory of each. races: those that `run`
    found. n_written: how often it wrote each byte of a tensor.
    """

    def __init__(
        self,
        program: Program,
        ctas: int,
        cluster: int,
        clusters: int,
        parameters: Sequence[int],
        tensors: Sequence[tuple[int, np.ndarray]],
    ):
        n = ctas * program.threads
        self.program, self.ctas, self.tensors, self.n = program, ctas, tensors, n
        self.parameters = dict(zip(program.parameters, parameters, strict=True))
        self.thread, self.cta = np.arange(n) % program.threads, np.arange(n) // program.threads
        self.registers: dict[str, Bits] = {
            "%tid.x": self.thread.astype(np.uint64),
            "%cluster_ctarank": self.cta.astype(np.uint64),
            "%ctaid.x": (cluster * ctas + self.cta).astype(np.uint64),
            "%nctaid.x": np.full(n, clusters * ctas, np.uint64),
            "%nsmid": np.full(n, MULTIPROCESSORS, np.uint64),
            **{name: np.full(n, first, np.uint64) for name, (first, _) in program.shared.items()},
        }
        self.at, self.state = np.zeros(n, np.int64), np.full(n, RUNS)
        self.ended, self.waited = np.zeros(n, bool), np.zeros(n, bool)
        # cluster barriers at which a thread has arrived, and those for which it has waited
        self.arrived, self.joined = np.zeros(n, np.int64), np.zeros(n, np.int64)
        self.made = np.full(ctas, 1 << 30)  # how often the thread that made the CTA's mbarrier had arrived by then
        self.expected, self.pending = np.zeros(ctas, np.int64), np.ones(ctas, np.int64)  # bytes, arrivals
        size = max((first + size for first, size in program.shared.values()), default=0)
        self.memory, units = np.full((ctas, size), 0xFF, np.uint8), (ctas, size // UNIT)  # float32: NaN
        # of each unit: the last writer and reader, since which barrier, and whether there were more of them
        self.writer, self.written, self.reader, self.read = (np.full(units, -1, np.int32) for _ in range(4))
        self.readers, self.writers, self.asynchronous = (np.zeros(units, bool) for _ in range(3))
        self.barriers, self.votes = np.zeros(ctas, np.int64), np.zeros(n, bool)
        self.voted: str | None = None  # the register of what a vote gives
        self.steps, self.races = 0, list[Race]()
        self.n_written = [np.zeros(len(memory), np.int64) for _, memory in tensors]

    def run(self) -> Machine:
        while not self.ended.all():
            runs = ~self.ended & (self.state == RUNS)
            if not runs.any():
                raise RuntimeError("all threads wait")
            at = int(self.at[runs].min())
            here = runs & (self.at == at)
            self.steps += 1
            self.current = now = self.program.instructions[at]
            does = here if now.predicate is None else here & ((self.registers[now.predicate] != 0) != now.negated)
            self.at[here] = at + 1
            if now.op.startswith("bra"):
                self.at[does] = self.program.labels[now.operands[0]]
            elif now.op == "ret":
                self.ended |= does
            elif does.any():
                self._do(now.op, now.operands, does)
            self._release()
        return self

    def _value(self, operand: str) -> Bits:
        if operand in self.registers:
            return self.registers[operand]
        if operand == "%clock":
            return np.full(self.n, self.steps << 10, np.uint64)
        number = operand.lower()
        return np.full(self.n, int(number.replace("0f", "0x", 1), 0) & ((1 << 64) - 1), np.uint64)

    def _set(self, register: str, bits: Bits, does: np.ndarray) -> None:
        before = self.registers.get(register, np.zeros(self.n, np.uint64))
        self.registers[register] = np.where(does, bits, before)

    def _address(self, operand: str) -> Bits:
        base, _, offset = operand.strip("[]").partition("+")
        return self._value(base.strip()) + np.uint64(int(offset or 0) & ((1 << 64) - 1))

    def _release(self) -> None:
        """Lets threads go on for which what they wait for has come."""
        for cta in range(self.ctas):
            of = (self.cta == cta) & ~self.ended
            if of.any() and (self.state[of] == CTA).all():
                self.state[of] = RUNS
                self.barriers[cta] += 1
                if self.voted is not None:
                    self._set(self.voted, np.full(self.n, self.votes[of].any(), np.uint64), of)
            if self.pending[cta] == 0 == self.expected[cta]:
                waits = of & (self.state == ARRIVALS)
                self.state[waits], self.waited[waits] = RUNS, True
        complete = self.arrived[~self.ended].min(initial=1 << 30)
        waits = (self.state == CLUSTER) & (self.arrived <= complete)
        self.state[waits], self.joined[waits] = RUNS, self.arrived[waits]

    def _do(self, op: str, operands: tuple[str, ...], does: np.ndarray) -> None:
        name = op.split(".")[0]
        if op.startswith(IGNORED):
            pass
        elif name == "createpolicy":
            self._set(operands[0], np.zeros(self.n, np.uint64), does)
        elif op == "bar.sync" and operands == ("0",):
            self.state[does], self.voted = CTA, None
        elif op == "barrier.cta.red.or.pred":
            self.state[does], self.voted, self.votes = CTA, operands[0], self.registers[operands[2]] != 0
        elif op.startswith("barrier.cluster.arrive"):
            self.arrived += does
        elif op.startswith("barrier.cluster.wait"):
            self.state[does] = CLUSTER
        elif name == "mbarrier":
            self._mbarrier(op, operands, does)
        elif name == "mapa":
            place = self._value(operands[1]) | self._value(operands[2]) << RANK
            self._set(operands[0], place, does)
        elif op.startswith("st.async"):
            self._send(operands, does)
        elif op.startswith("ld.param"):
            self._set(operands[0], self._value(str(self.parameters[operands[1].strip("[]")])), does)
        elif name in ("ld", "st"):
            into, address = (operands[1], operands[0]) if name == "st" else operands[:2]
            values, size = _operands(into.strip("{}")), int(op.rpartition(".")[2][1:]) // 8
            if ".shared" in op:
                self._shared(name == "st", size, self._address(address), values, does)
            else:
                self._global(name == "st", size, self._address(address), values, does)
        elif op.startswith(("cp.async.ca", "cp.async.cg")):
            self._copy(op, operands, does)
        elif name == "cvta":
            self._set(operands[0], self._value(operands[1]), does)
        elif op == "shfl.sync.bfly.b32":
            peer = np.arange(self.n) ^ int(operands[2], 0)
            assert does.reshape(-1, LANES).all(1).sum() * LANES == does.sum(), "a part of a warp shuffles"
            self._set(operands[0], self._value(operands[1])[peer], does)
        elif name == "mov":
            self._move(op, operands, does)
        else:
            self._set(operands[0], evaluate(op, [self._value(operand) for operand in operands[1:]]), does)

    def _move(self, op: str, operands: tuple[str, ...], does: np.ndarray) -> None:
        """mov, also between a register and its halves."""
        to, of = operands
        width = int(op[-2:]) if op != "mov.pred" else 64
        half = np.uint64(width // 2)
        if to.startswith("{"):
            lower, upper = _operands(to.strip("{}"))
            self._set(lower, masked(self._value(of), width // 2), does)
            self._set(upper, masked(self._value(of) >> half, width // 2), does)
        elif of.startswith("{"):
            lower, upper = (masked(self._value(part), width // 2) for part in _operands(of.strip("{}")))
            self._set(to, lower | upper << half, does)
        else:
            self._set(to, masked(self._value(of), width), does)

    def _copy(self, op: str, operands: tuple[str, ...], does: np.ndarray) -> None:
        """cp.async of 4, 8 or 16 bytes; zeros where it has a number of bytes to read that is 0."""
        words = tuple(f"copied{i}" for i in range(int(operands[2]) // 4))
        sized = len(operands) > 3 + ("cache_hint" in op)
        reads = does & (self._value(operands[3]) != 0) if sized else does
        for word in words:
            self._set(word, np.zeros(self.n, np.uint64), does)
        if reads.any():
            self._global(False, 4, self._address(operands[1]), words, reads)
        self._shared(True, 4, self._address(operands[0]), words, does)

    def _mbarrier(self, op: str, operands: tuple[str, ...], does: np.ndarray) -> None:
        """One mbarrier for each CTA, and its first phase."""
        if op.startswith("mbarrier.try_wait"):
            self.state[does] = ARRIVALS
            self._set(operands[0], np.ones(self.n, np.uint64), does)
            return
        for thread in np.flatnonzero(does):
            cta = self.cta[thread]
            if op.startswith("mbarrier.init"):
                self.pending[cta], self.made[cta] = int(operands[1]), self.arrived[thread]
            elif op.startswith("mbarrier.arrive.expect_tx"):
                self.pending[cta] -= 1
                self.expected[cta] += int(self._value(operands[2])[thread])
            else:
                raise NotImplementedError(op)

    def _send(self, operands: tuple[str, ...], does: np.ndarray) -> None:
        """st.async: writes into the shared memory of a CTA of the cluster."""
        address, values = self._address(operands[0])[does], _operands(operands[1].strip("{}"))
        cta, first = (address >> RANK).astype(np.int64), self._bytes_at(masked(address, 24), 4 * len(values))
        assert (self._address(operands[2])[does] >> RANK == address >> RANK).all(), "the mbarrier of another CTA"
        at = self._units(cta, first, 4 * len(values))
        early = (self.joined[does] <= self.made[cta])[:, None] & (cta != self.cta[does])[:, None]
        self._note("sent before a barrier of the cluster", at, does, np.broadcast_to(early, at[1].shape))
        self._note("sent over others", at, does, (self.written[at] >= 0) | (self.read[at] >= 0))
        self._note("sent twice", at, does, self.asynchronous[at])
        self.asynchronous[at] = True
        for i, value in enumerate(values):
            self._put(cta, first + 4 * i, value, 4, does)
        np.subtract.at(self.expected, cta, 4 * len(values))

    def _bytes_at(self, address: Bits, n: int) -> np.ndarray:
        """The first bytes of accesses to n bytes, which lie in one variable of shared memory."""
        assert not (address % np.uint64(n)).any(), "misaligned"
        ends = address + np.uint64(n)
        inside = [(address >= first) & (ends <= first + size) for first, size in self.program.shared.values()]
        assert np.any(inside, 0).all(), f"outside of shared memory: {self.current}"
        return address.astype(np.int64)

    def _units(self, cta: np.ndarray, first: np.ndarray, n: int) -> tuple[np.ndarray, np.ndarray]:
        """CTA and unit of each unit that accesses to n bytes touch.  # [accesses, units]"""
        units = first[:, None] // UNIT + np.arange(n // UNIT)
        return np.broadcast_to(cta[:, None], units.shape), units

    def _put(self, cta: np.ndarray, first: np.ndarray, value: str, size: int, does: np.ndarray) -> None:
        part = np.ascontiguousarray(self._value(value)[does]).view(np.uint8).reshape(-1, 8)[:, :size]
        at = cta[:, None], first[:, None] + np.arange(size)
        self.memory[at] = part
        self._note("other writes", at, does, self.memory[at] != part)

    def _shared(self, stores: bool, size: int, address: Bits, values: tuple[str, ...], does: np.ndarray) -> None:
        if size < UNIT:
            raise NotImplementedError(self.current.op)
        n = size * len(values)
        cta, first = self.cta[does], self._bytes_at(address[does], n)
        self._expect_no_race(stores, self._units(cta, first, n), does)
        for i, value in enumerate(values):
            if stores:
                self._put(cta, first + i * size, value, size, does)
            else:
                found = np.zeros((self.n, 8), np.uint8)
                found[does, :size] = self.memory[cta[:, None], first[:, None] + i * size + np.arange(size)]
                self._set(value, found.view(np.uint64)[:, 0], does)

    def _expect_no_race(self, stores: bool, at: tuple[np.ndarray, np.ndarray], does: np.ndarray) -> None:
        thread, since = self.thread[does][:, None], self.barriers[at[0]]
        self._note("sent meanwhile", at, does, self.asynchronous[at] & (stores | ~self.waited[does][:, None]))
        written = self.written[at] == since
        other = written & (self.writer[at] != thread)
        _, same, count = np.unique(at[0] * self.writer.shape[1] + at[1], return_inverse=True, return_counts=True)
        several = (count > 1)[same].reshape(at[1].shape)
        if stores:
            self._note("write after write", at, does, other | written & self.writers[at])
        else:
            self._note("read after write", at, does, other)
        more = (self.read[at] == since) & ((self.reader[at] != thread) | self.readers[at])
        if stores:
            self._note("write after read", at, does, more)
            self.writers[at] = other | several
            self.writer[at], self.written[at] = np.broadcast_to(thread, at[1].shape), since
        else:
            self.readers[at] = more | several
            self.reader[at], self.read[at] = np.broadcast_to(thread, at[1].shape), since

    def _note(self, kind: str, at: tuple[np.ndarray, np.ndarray], does: np.ndarray, races: np.ndarray) -> None:
        if races.any():
            access, unit = np.argwhere(races)[0]
            race = Race(kind, self.current, int(at[1][access, unit]), int(np.flatnonzero(does)[access]))
            self.races.append(race)

    def _global(self, stores: bool, size: int, address: Bits, values: tuple[str, ...], does: np.ndarray) -> None:
        address, n_bytes = address[does].astype(np.int64), size * len(values)
        first, last = address.min(), address.max() + n_bytes
        inside = [first >= start and last <= start + len(memory) for start, memory in self.tensors]
        assert any(inside), f"outside of all tensors: {self.current}"
        assert not (address % n_bytes).any(), "misaligned"
        of = inside.index(True)
        start, memory = self.tensors[of]
        for i, value in enumerate(values):
            places = (address - start + i * size)[:, None] + np.arange(size)
            if stores:
                memory[places] = self._value(value)[does].view(np.uint8).reshape(-1, 8)[:, :size]
                np.add.at(self.n_written[of], places, 1)
            else:
                found = np.zeros((self.n, 8), np.uint8)
                found[does, :size] = memory[places]
                self._set(value, found.view(np.uint64)[:, 0], does)
