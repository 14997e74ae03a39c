"""Runs the PTX of one cluster on numpy, and names races: what threads do to the same word of shared memory.

A race is two accesses of different threads, one of them a write, without a barrier of the CTA between them. A word that
`st.async` writes is only read, by threads that have waited for the mbarrier. Accesses of global memory must lie in a
tensor. Of all threads, those run that are furthest behind in the program.

It knows what kernels of planes in registers have (`ptx_arithmetic` has the arithmetic); else it raises
NotImplementedError. It does not see what ptxas makes of the PTX.
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
IGNORED = ("fence", "griddepcontrol", "createpolicy")


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
    kind: str
    instruction: Instruction
    word: int
    thread: int


def _operands(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in re.split(r",(?![^{\[]*[}\]])", text) if part.strip())


def parse(ptx: str) -> Program:
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
    threads = int(re.search(r"\.reqntid (\d+)", ptx)[1])
    names = re.findall(r"\.param [^\n]*?(\w+_param_\d+)", header)
    return Program(tuple(instructions), labels, shared, tuple(names), threads)


class Machine:
    """A cluster of so many CTAs, the `cluster`th of its grid. parameters: a number for each of the program's.

    tensors: the address and the memory of each. races: those that `run` found. n_written: how often it wrote each byte
    of a tensor.
    """

    def __init__(
        self,
        program: Program,
        ctas: int,
        cluster: int,
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
            **{name: np.full(n, first, np.uint64) for name, (first, _) in program.shared.items()},
        }
        self.at, self.state = np.zeros(n, np.int64), np.full(n, RUNS)
        self.ended, self.arrived, self.waited = np.zeros(n, bool), np.zeros(n, bool), np.zeros(n, bool)
        self.expected, self.pending = np.zeros(ctas, np.int64), np.ones(ctas, np.int64)  # bytes, arrivals
        self.words = np.full((ctas, max(first + size for first, size in program.shared.values()) // 4), 0x7FC00001)
        # of each word: the last writer and reader since which barrier, whether there were more readers
        self.writer, self.written, self.reader, self.read = (np.full(self.words.shape, -1) for _ in range(4))
        self.readers, self.asynchronous = np.zeros(self.words.shape, bool), np.zeros(self.words.shape, bool)
        self.barriers = np.zeros(ctas, np.int64)
        self.races: list[Race] = []
        self.n_written = [np.zeros(len(memory), np.int64) for _, memory in tensors]

    def run(self) -> Machine:
        while not self.ended.all():
            runs = ~self.ended & (self.state == RUNS)
            if not runs.any():
                raise RuntimeError("all threads wait")
            at = int(self.at[runs].min())
            here = runs & (self.at == at)
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
            if self.pending[cta] == 0 == self.expected[cta]:
                waits = of & (self.state == ARRIVALS)
                self.state[waits], self.waited[waits] = RUNS, True
        if self.arrived[~self.ended].all():
            self.state[self.state == CLUSTER] = RUNS

    def _do(self, op: str, operands: tuple[str, ...], does: np.ndarray) -> None:
        name = op.split(".")[0]
        if op.startswith(IGNORED):
            if name == "createpolicy":
                self._set(operands[0], np.zeros(self.n, np.uint64), does)
        elif op == "bar.sync":
            self.state[does] = CTA
        elif op.startswith("barrier.cluster.arrive"):
            self.arrived |= does
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
            access = self._shared if ".shared" in op else self._global
            access(name == "st", int(op[-2:]) // 8, self._address(address), _operands(into.strip("{}")), does)
        elif name == "shfl":
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
        width = int(op[-2:])
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

    def _mbarrier(self, op: str, operands: tuple[str, ...], does: np.ndarray) -> None:
        """One mbarrier for each CTA, and its first phase."""
        if op.startswith("mbarrier.try_wait"):
            self.state[does] = ARRIVALS
            self._set(operands[0], np.ones(self.n, np.uint64), does)
            return
        for cta in self.cta[does]:
            if op.startswith("mbarrier.init"):
                self.pending[cta] = int(operands[1])
            elif op.startswith("mbarrier.arrive.expect_tx"):
                self.pending[cta] -= 1
                self.expected[cta] += int(self._value(operands[2])[does & (self.cta == cta)][0])
            else:
                raise NotImplementedError(op)

    def _send(self, operands: tuple[str, ...], does: np.ndarray) -> None:
        """st.async: writes into the shared memory of a CTA of the cluster."""
        address, values = self._address(operands[0])[does], _operands(operands[1].strip("{}"))
        cta, first = (address >> RANK).astype(np.int64), self._words_at(masked(address, 24), len(values))
        for i, value in enumerate(values):
            self._note("sent over others", cta, first + i, does, self.written[cta, first + i] >= 0)
            self._note("sent twice", cta, first + i, does, self.asynchronous[cta, first + i])
            self.asynchronous[cta, first + i] = True
            self.words[cta, first + i] = masked(self._value(value)[does], 32)
        np.subtract.at(self.expected, cta, 4 * len(values))

    def _words_at(self, address: Bits, n: int) -> np.ndarray:
        """The first words of accesses to n words, which lie in one variable of shared memory."""
        assert not (address % np.uint64(4 * n)).any(), "misaligned"
        ends = address + np.uint64(4 * n)
        inside = [(address >= first) & (ends <= first + size) for first, size in self.program.shared.values()]
        assert np.any(inside, 0).all(), f"outside of shared memory: {self.current}"
        return (address // np.uint64(4)).astype(np.int64)

    def _shared(self, stores: bool, size: int, address: Bits, values: tuple[str, ...], does: np.ndarray) -> None:
        if size != 4:
            raise NotImplementedError(self.current.op)
        cta, first = self.cta[does], self._words_at(address[does], len(values))
        for i, value in enumerate(values):
            self._expect_no_race(stores, cta, first + i, does)
            if stores:
                self.words[cta, first + i] = masked(self._value(value)[does], 32)
            else:
                found = np.zeros(self.n, np.uint64)
                found[does] = self.words[cta, first + i]
                self._set(value, found, does)

    def _expect_no_race(self, stores: bool, cta: np.ndarray, word: np.ndarray, does: np.ndarray) -> None:
        thread, since, at = self.thread[does], self.barriers[cta], (cta, word)
        sent = self.asynchronous[at]
        self._note("sent meanwhile", cta, word, does, sent & (stores | ~self.waited[does]))
        other = (self.written[at] == since) & (self.writer[at] != thread)
        self._note("write after write" if stores else "read after write", cta, word, does, other)
        _, first, same, count = np.unique(
            cta * self.words.shape[1] + word, return_index=True, return_inverse=True, return_counts=True
        )
        several = count[same] > 1
        was_read = self.read[at] == since
        more = was_read & ((self.reader[at] != thread) | self.readers[at])
        if stores:
            self._note("write after write", cta, word, does, several)
            self._note("write after read", cta, word, does, more)
            self.writer[at], self.written[at] = thread, since
        else:
            self.readers[at] = more | several
            self.reader[at], self.read[at] = thread, since

    def _note(self, kind: str, cta: np.ndarray, word: np.ndarray, does: np.ndarray, races: np.ndarray) -> None:
        if races.any():
            self.races.append(Race(kind, self.current, int(word[races][0]), int(np.flatnonzero(does)[races][0])))

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
