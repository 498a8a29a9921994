"""The control-flow graph of a kernel: blocks, dominators, loops. Knows branches, not values."""

from __future__ import annotations

from dataclasses import dataclass, field

from woodfrog.kernels import limits
from woodfrog.kernels.error import AnalysisLimitError
from woodfrog.kernels.ptx.syntax import Instruction, Label, SourceLine, Statement, Targets


@dataclass(slots=True)
class Edge:
    """A way from one block to another. `predicate` "" means that nothing is known about when it is taken."""

    target: int
    predicate: str = ""
    negated: bool = False


@dataclass(slots=True)
class Block:
    """Instructions that run one after the other; the last may be a branch, kept here too."""

    number: int
    instructions: list[Instruction] = field(default_factory=list)
    edges: list[Edge] = field(default_factory=list)
    predecessors: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Loop:
    """A natural loop."""

    number: int
    header: int
    blocks: frozenset[int]
    latches: list[int]
    parent: int | None = None  # number of the loop around it


class Flow:
    """Blocks in reverse postorder (block 0 is the entry; unreachable ones are gone)."""

    def __init__(self, statements: list[Statement]) -> None:
        self.source_lines: dict[int, tuple[int, int]] = {}  # position of an instruction → file, line
        self.blocks = self._order(self._split(statements))
        for block in self.blocks:
            for edge in block.edges:
                predecessors = self.blocks[edge.target].predecessors
                if block.number not in predecessors:
                    predecessors.append(block.number)
        self.dominator = self._dominators()
        self.postdominators = self._postdominator_sets()
        self.loops = self._loops()
        self.loop_of: list[int | None] = [None] * len(self.blocks)  # innermost loop of each block
        for loop in sorted(self.loops, key=lambda one: -len(one.blocks)):
            for number in loop.blocks:
                self.loop_of[number] = loop.number
        self.loop_at = {loop.header: loop for loop in self.loops}

    def _split(self, statements: list[Statement]) -> list[Block]:
        blocks = [Block(0)]
        labels: dict[str, int] = {}
        targets: dict[str, tuple[str, ...]] = {}
        ended = False
        source = (0, 0)
        for statement in statements:
            if isinstance(statement, SourceLine):
                source = (statement.file, statement.line)
                continue
            if isinstance(statement, Targets):
                targets[statement.name] = statement.labels
                continue
            if isinstance(statement, Label):
                if blocks[-1].instructions or ended or statement.name in labels:
                    blocks.append(Block(len(blocks)))
                    ended = False
                labels[statement.name] = len(blocks) - 1
                continue
            if ended:
                blocks.append(Block(len(blocks)))
            blocks[-1].instructions.append(statement)
            self.source_lines[statement.position] = source
            ended = statement.opcode in ("bra", "brx", "ret", "exit", "trap")
            if len(blocks) > limits.BLOCKS:
                raise AnalysisLimitError(f"it has more than {limits.BLOCKS} basic blocks")
        for block in blocks:
            self._edges(block, labels, targets, len(blocks))
        return blocks

    @staticmethod
    def _edges(block: Block, labels: dict[str, int], targets: dict[str, tuple[str, ...]], count: int) -> None:
        last = block.instructions[-1] if block.instructions else None
        falls_through = True
        if last is not None and last.opcode in ("bra", "brx"):
            names: tuple[str, ...] = ()
            if last.opcode == "bra" and last.operands and isinstance(last.operands[0], str):
                names = (last.operands[0],)
            elif len(last.operands) > 1 and isinstance(last.operands[1], str):
                names = targets.get(last.operands[1], ())
            if not names or any(name not in labels for name in names):
                raise AnalysisLimitError("it branches to a place that is not known")
            single = len(names) == 1
            for number in dict.fromkeys(labels[name] for name in names):
                block.edges.append(Edge(number, last.predicate if single else "", last.negated))
            falls_through = bool(last.predicate)
        elif last is not None and last.opcode in ("ret", "exit", "trap"):
            falls_through = bool(last.predicate)
        if falls_through and block.number + 1 < count:
            follower = block.number + 1
            if any(edge.target == follower for edge in block.edges):
                block.edges = [Edge(edge.target) for edge in block.edges]  # both ways lead there
            elif last is not None and last.predicate and last.opcode in ("bra", "ret", "exit", "trap"):
                block.edges.append(Edge(follower, last.predicate, not last.negated))
            else:
                block.edges.append(Edge(follower))

    @staticmethod
    def _order(blocks: list[Block]) -> list[Block]:
        seen = {0}
        postorder: list[int] = []
        stack = [(0, iter([edge.target for edge in blocks[0].edges]))]
        while stack:
            number, targets = stack[-1]
            for target in targets:
                if target not in seen:
                    seen.add(target)
                    stack.append((target, iter([edge.target for edge in blocks[target].edges])))
                    break
            else:
                postorder.append(number)
                stack.pop()
        order = postorder[::-1]
        new = {old: index for index, old in enumerate(order)}
        result = []
        for old in order:
            block = blocks[old]
            edges = [Edge(new[edge.target], edge.predicate, edge.negated) for edge in block.edges]
            result.append(Block(new[old], block.instructions, edges))
        return result

    def _dominators(self) -> list[int]:
        """Immediate dominators, by the algorithm of Cooper, Harvey and Kennedy. The entry's is itself."""
        undefined = -1
        dominator = [undefined] * len(self.blocks)
        dominator[0] = 0
        changed = True
        while changed:
            changed = False
            for block in self.blocks[1:]:
                new = undefined
                for predecessor in block.predecessors:
                    if dominator[predecessor] == undefined:
                        continue
                    if new == undefined:
                        new = predecessor
                        continue
                    a, b = predecessor, new
                    while a != b:
                        while a > b:
                            a = dominator[a]
                        while b > a:
                            b = dominator[b]
                    new = a
                if new != dominator[block.number]:
                    dominator[block.number] = new
                    changed = True
        return dominator

    def dominates(self, a: int, b: int) -> bool:
        while b > a:
            b = self.dominator[b]
        return a == b

    def _postdominator_sets(self) -> list[int]:
        """For each block, a bit set of the blocks that every way from it to the end passes."""
        everything = (1 << len(self.blocks)) - 1
        sets = [everything] * len(self.blocks)
        changed = True
        while changed:
            changed = False
            for block in reversed(self.blocks):
                # A `ret` under a predicate is a way to the end as well.
                last = block.instructions[-1].opcode if block.instructions else ""
                leaves = not block.edges or last in ("ret", "exit", "trap")
                meet = 0 if leaves else everything
                for edge in block.edges:
                    meet &= sets[edge.target]
                new = meet | 1 << block.number
                if new != sets[block.number]:
                    sets[block.number] = new
                    changed = True
        return sets

    def postdominates(self, a: int, b: int) -> bool:
        """Whether every way from b to the end passes a."""
        return bool(self.postdominators[b] >> a & 1)

    def _loops(self) -> list[Loop]:
        latches: dict[int, list[int]] = {}
        for block in self.blocks:
            for edge in block.edges:
                if edge.target <= block.number:
                    if not self.dominates(edge.target, block.number):
                        raise AnalysisLimitError("it jumps into the middle of a loop")
                    latches.setdefault(edge.target, []).append(block.number)
        loops: list[Loop] = []
        for header in sorted(latches):
            inside = {header}
            stack = list(latches[header])
            while stack:
                number = stack.pop()
                if number not in inside:
                    inside.add(number)
                    stack.extend(self.blocks[number].predecessors)
            loops.append(Loop(len(loops), header, frozenset(inside), latches[header]))
        for loop in loops:
            around = [o for o in loops if o is not loop and loop.header in o.blocks and o.header != loop.header]
            if around:
                loop.parent = min(around, key=lambda one: len(one.blocks)).number
        return loops

    def chain(self, loop: int | None) -> frozenset[int]:
        """A loop and all loops around it."""
        found = []
        while loop is not None:
            found.append(loop)
            loop = self.loops[loop].parent
        return frozenset(found)
