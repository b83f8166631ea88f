"""The tangent sweep of the `llvm` backend over the record of a forward pass."""

import functools

from gradsolve_backend.kernels.llvm_arrays import Array
from gradsolve_backend.kernels.llvm_flow import arithmetic, compare, counting, during, smaller, when
from gradsolve_backend.kernels.llvm_ir import Body
from gradsolve_backend.kernels.llvm_loops import INT, Frame
from gradsolve_backend.kernels.llvm_sweeps import Sweep
from gradsolve_backend.kernels.routines import Place


class Tangent(Sweep):
    """Results: tangents of the reached loop variables, then of the values of the outputs."""

    @functools.cached_property
    def saved_results(self) -> dict[tuple[int, int], Array]:
        """Results that are buffers of tangents of saved values, by output and leaf."""
        keys = [(o, j) for o in range(len(self.call.solve.outputs)) for j in self.pieces.leaves(o)]
        return dict(zip(keys, self.arrays.results[len(self.call.reached) :], strict=True))

    @property
    def summed(self) -> dict[int, Array]:
        return {}

    def leave_linear(self, body: Body) -> None:
        for i, array in zip(self.call.reached, self.arrays.results, strict=False):
            self.leave(body, ("d", i), array)

    def _zero_cursor(self, body: Body, o: int) -> Place:
        """The slot of an output's cursor, set to the first."""
        place = self.place(body, ("cursor", o, 1))
        body.line(f"store {body.type(INT)} zeroinitializer, ptr {place}, align 4")
        return ("cursor", o, 1)

    def enter_linear(self, body: Body) -> None:
        given = dict(zip(self.call.carry, self.arrays.linear, strict=False))
        for i in self.call.reached:
            if i in given:
                self.enter(body, given[i], ("d", i))
                continue
            slot = self.layout.slot(("d", i))
            for e in range(slot.elements):
                offset = slot.offset + e * slot.dtype.itemsize * self.target.width
                body.store(body.splat(0, slot.dtype), self.column, offset)
        for i, array in zip(self.call.operands, self.arrays.linear[len(self.call.carry) :], strict=True):
            if ("d operand", i) in self.layout.slots:
                self.enter(body, array, ("d operand", i))
        self.clear_tails(body, {o: self._zero_cursor(body, o) for o, _ in self.saved_results})

    def write_steps(self) -> None:
        """`@push_step`: forward through the step of a row."""
        pieces = self.pieces
        push = pieces.push(self.apart)
        self.write(push)
        body = self.body("push_step")
        with when(body, self.moved_row(body)):
            if push.late:
                self.run(body, push.name, part=0)
            with self.each_column(body):
                self.run(body, push.name, part=1 if push.late else None)
            for o, output in enumerate(self.call.solve.outputs):
                if output.sample is not None:
                    self._push_samples(body, o)
                if output.every:
                    routine = pieces.emit(o, replayed=output.sample is None)
                    self.write(routine)
                    self.run(body, routine.name)
                    with self.each_column(body):
                        self.scatter(body, o, "d emitted", pieces.leaves(o))
        self.end(body)

    def _push_samples(self, body: Body, o: int) -> None:
        """Walk through the requested times in the step; with many columns each stays there until all have been."""
        pieces = self.pieces
        sample = pieces.sample_push(o, self.apart)
        self.write(pieces.due(o, replayed=True), sample)
        self.run(body, f"redue.{o}")
        with during(body, lambda: self.any(body, ("more", o))):
            if self.apart:
                self.write(pieces.here(o), pieces.passed(o))
                self.run(body, f"here.{o}")
            if sample.late:
                self.run(body, sample.name, part=0)
            with self.each_column(body):
                self.run(body, sample.name, part=1 if sample.late else None)
                self.scatter(body, o, "d value", pieces.leaves(o))
            if self.apart:
                self.run(body, f"pass.{o}")

    def sweep(self, body: Body) -> None:
        """Through the rows, then on from where they end; from the start if they are not of these lanes."""
        frame = Frame(body, self.head)
        right, wrong, end = (body.fresh_label(stem) for stem in ("right", "wrong", "swept"))
        body.branch_if(self.verified(body), right, wrong)
        body.label(wrong)
        self.call_step(body, "start", "null")
        frame.steps.set(0)
        self._onward(body)
        body.branch(end)
        body.label(right)
        rows, count, checkpoints, _ = self.region(body)
        steps = frame.steps.get()
        with counting(body, 0, smaller(body, steps, count)) as i:
            row = body.address(rows, arithmetic(body, "mul", i, self.layout.row_bytes))
            self.call_step(body, "push_step", row)
        with when(body, compare(body, "sgt", steps, count)):
            self.resume(body, checkpoints)
            frame.steps.set(count)
            self._onward(body)
        body.branch(end)
        body.label(end)

    def _onward(self, body: Body) -> None:
        """Run the steps that are left, and push through each."""
        frame, local = Frame(body, self.head), body.address("%frame", self.local_row)
        with during(body, lambda: self.more_steps(body, frame.steps)):
            self.call_step(body, "forward_step", local)
            self.call_step(body, "push_step", local)
            frame.steps.set(arithmetic(body, "add", frame.steps.get(), 1))
