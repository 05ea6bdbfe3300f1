"""A soak of training: random models under changing budgets, compared with a reference to the last bit.

    python tests/soak_training.py --steps 10000 --seed 1
    python tests/soak_training.py --round 17        # repeats one round, as named by a failure
    python tests/soak_training.py --device cuda     # on a GPU

A round is a process with its own configuration (one or two emulated devices, with or without random delays).
It trains several models, one after the other. Each step also runs as the reference: on the CPU, or on a GPU
in plain memory. Losses are compared after each step, parameters and optimizer state at the end of a model.
The invariants of the engine and the allocator are checked periodically.
"""

from __future__ import annotations

import argparse
import copy
import faulthandler
import gc
import json
import os
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext

import torch
from _gpu_guard import GIB, MIB, Guard, check_room
from _soak_programs import CLASSES, Program, images, optimizer_of
from torch import nn
from torch.nn import functional as F

import torch_uvm
from torch_uvm import _C

LIMIT = 4 * GIB  # of managed memory on a GPU
STEPS_OF_A_ROUND = 100
COUNTED = ["fetched", "written_back", "dropped_clean", "used_in_place"]
ROUND_TIMEOUT = 900  # seconds; a hanging round dumps its stacks


class Different(AssertionError):
    """The accelerator's bits differ from the reference's."""


def compare(what: str, found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Reports where the two differ, which tells a wrong block, a wrong page and a wrong rounding apart."""
    found, wanted = found.detach().cpu(), wanted.detach().cpu()
    if torch.equal(found, wanted) or (found.isnan() == wanted.isnan()).all() and wanted.isnan().all():
        return
    wrong = (found != wanted).flatten().nonzero().flatten()
    flat_found, flat_wanted = found.flatten(), wanted.flatten()
    size, first, last = found.element_size(), int(wrong[0]), int(wrong[-1])
    equal = last + 1 - first - len(wrong)
    most = float((flat_found - flat_wanted).abs().max())
    some = slice(first, first + 4)
    raise Different(
        f"{what} {tuple(found.shape)} {found.dtype}: {len(wrong)} of {found.numel()} elements differ, bytes "
        f"{first * size} to {(last + 1) * size}, {equal} equal ones between; at most by {most}; first: "
        f"{flat_found[some].tolist()}, not {flat_wanted[some].tolist()}"
    )


class Round:
    """The work of one process. The seed alone decides what happens."""

    def __init__(self, seed: int, verbose: bool, kind: str) -> None:
        self.rng = random.Random(seed)
        self.verbose = verbose
        self.history: list[str] = []
        self.moved: dict[str, int] = {}
        self.refused = 0
        self.changed = False  # whether a budget changed in this step
        self.guard: Guard | None = None
        if kind == "cuda":
            self.use_a_gpu()
        else:
            self.use_emulated_devices()

    def use_emulated_devices(self) -> None:
        self.count = self.rng.choice([1, 1, 2, 2])
        delayed = self.rng.random() < 0.5
        torch_uvm.emulated.configure(
            devices=self.count,
            memory=self.rng.choice([64 * MIB, 256 * MIB]),
            seed=self.rng.randrange(1 << 32) if delayed else None,
        )
        self.devices = [torch.device("emu", index) for index in range(self.count)]
        self.reference = torch.device("cpu")
        self.scale = 1  # of batches
        self.least_budget = 12 * MIB
        self.note(f"{self.count} devices, {'delayed' if delayed else 'in order'}")

    def use_a_gpu(self) -> None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        torch.use_deterministic_algorithms(True, warn_only=True)
        for others in ("flash", "mem_efficient", "cudnn"):  # attention that is not deterministic
            getattr(torch.backends.cuda, f"enable_{others}_sdp")(False)
        check_room(LIMIT)
        self.guard = Guard(LIMIT).hold()
        self.count = 1
        self.devices = [torch.device("cuda", 0)]
        self.reference = self.devices[0]
        self.scale = 32
        self.least_budget = 96 * MIB  # with cuBLAS's workspace

    def note(self, what: str) -> None:
        self.history.append(what)
        if self.verbose:
            print(what, flush=True)

    def change_budget(self, used: int) -> None:
        """Sets a random budget of one device or all: hard, soft, or none."""
        rng = self.rng
        device = rng.choice([None, None, *self.devices])
        share = rng.choice([0.35, 0.5, 0.6, 0.8, 1.1])
        budget = rng.choice(["figure", "figure", "figure", "auto", None, "percent"])
        if budget == "figure":
            value: int | str | None = max(self.least_budget, int(share * used))
        elif budget == "percent":
            value = f"{rng.choice([30, 50, 90])}%"
        else:
            value = budget
        self.note(f"  budget {value} of {device or 'all'}")
        self.changed = True
        torch_uvm.set_budget(value, device)

    def disturb(self, model: Program) -> None:
        """Random actions of programs between steps, which must not change results."""
        rng = self.rng
        what = rng.choice(["empty", "collect", "prefetch", "keep", "evaluate", "state", "cpu", "address"])
        self.note(f"  {what}")
        parameters = list(model.parameters())
        if what == "empty":
            torch_uvm.memory.empty_cache()
        elif what == "collect":
            gc.collect()
        elif what == "prefetch":
            torch_uvm.prefetch(rng.choice(parameters), rng.choice([None, "cpu"]))
        elif what == "keep":
            with torch_uvm.resident(rng.choice(parameters)):
                rng.choice(parameters).detach().sum()
        elif what == "state":
            model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()})
        elif what == "evaluate":
            with torch.no_grad():
                model.eval()(model.make_input(5).to(model.devices[0]), 0)
            model.train()
        elif what == "cpu":
            rng.choice(parameters).detach().cpu()
        elif what == "address":
            rng.choice(parameters).data_ptr()

    def check_invariants(self) -> None:
        for wrong in (_C.check_residency(), _C.check_allocator()):
            if wrong is not None:
                raise Different(f"invariant: {wrong}")
        if self.guard is not None:
            self.guard.check()

    def run(self, steps: int) -> int:
        done = 0
        while done < steps:
            done += self.train(min(steps - done, self.rng.randint(8, 40)))
        return done

    def train(self, steps: int) -> int:
        """Trains one model, from its creation to its end. Frees all of it."""
        rng = self.rng
        gc.collect()
        if rng.random() < 0.3:
            torch_uvm.memory.empty_cache()
        optimizer_kind = rng.choice(["in_place", "in_place", "deferred"])
        torch_uvm.enable(budget=rng.choice([None, None, "auto"]), optimizer=optimizer_kind)
        torch_uvm.memory.reset_peak_memory_stats()

        torch.manual_seed(rng.randrange(1 << 32))
        reference = Program(rng, self.count)
        ours = copy.deepcopy(reference).place(self.devices)
        with torch_uvm.disabled():
            reference.place([self.reference])
        named, make_optimizer = optimizer_of(rng)
        optimizers = [make_optimizer(model.parameters()) for model in (reference, ours)]
        accumulate = rng.choice([1, 1, 2, 3])
        clip = rng.choice([None, None, 1.0])
        autocast = rng.random() < 0.15
        set_to_none = rng.random() < 0.8
        used = rng.choice([16, 24, 40]) * MIB * self.scale
        self.note(
            f"{reference.describe()}; {named}, {optimizer_kind}, accumulate {accumulate}, clip {clip}, "
            f"dropout {reference.dropout}, autocast {autocast}"
        )
        for step in range(steps):
            self.note(f" step {step}")
            self.changed = False
            if rng.random() < 0.2:
                self.change_budget(used)
            if rng.random() < 0.2:
                self.disturb(ours)
            batches = [self.batch(reference) for _ in range(accumulate)]
            seed, leave_out = rng.randrange(1 << 32), rng.getrandbits(16) if rng.random() < 0.3 else 0
            change_at = rng.randrange(accumulate) if rng.random() < 0.1 else None
            losses: list[list[torch.Tensor]] = []
            try:
                for model, optimizer in zip((reference, ours), optimizers, strict=True):
                    with nullcontext() if model is ours else torch_uvm.disabled():
                        torch.manual_seed(seed)
                        losses.append([])
                        for number, (x, target) in enumerate(batches):
                            device = model.devices[-1]
                            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=autocast):
                                scores = model(x.to(model.devices[0]), leave_out)
                            loss = F.cross_entropy(scores.float(), target.to(device)) / accumulate
                            if model is ours and number == change_at:
                                self.change_budget(used)
                            loss.backward()
                            losses[-1].append(loss.detach())
                        if clip is not None and self.count == 1:
                            nn.utils.clip_grad_norm_(model.parameters(), clip)
                        elif clip is not None:  # norms are added per device, which is not the CPU's order
                            nn.utils.clip_grad_value_(model.parameters(), 0.01 * clip)
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=set_to_none)
            except torch.OutOfMemoryError as error:
                # A storage that no operator has used since the budget was set cannot be evicted, which is
                # documented. Only a changed budget may therefore run out of memory.
                if not self.changed:
                    raise
                self.note(f"  {str(error).splitlines()[0]}")
                self.refused += 1
                torch_uvm.set_budget(None)
                self.check_invariants()
                return step + 1
            for wanted, found in zip(*losses, strict=True):
                compare("loss", found, wanted)
            if rng.random() < 0.2:
                self.check_invariants()
            if step == 2:
                used = max(torch_uvm.memory.max_memory_allocated(device) for device in self.devices)
        for what, found, wanted in self.everything(ours, reference, optimizers):
            compare(what, found, wanted)
        self.check_invariants()
        stats = torch_uvm.stats()
        if stats["failures"]:
            raise Different(f"{stats['failures']} calls of the runtime failed")
        self.moved = {key: stats[key]["count"] for key in COUNTED}
        return steps

    def batch(self, model: Program) -> tuple[torch.Tensor, torch.Tensor]:
        size = self.rng.choice([4, 8, 16] if model.family is images else [4, 8, 16, 33])
        size *= self.scale
        return model.make_input(size), torch.randint(0, CLASSES, (size,))

    @staticmethod
    def everything(
        ours: nn.Module, reference: nn.Module, optimizers: list[torch.optim.Optimizer]
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        values = ours.state_dict()
        for name, wanted in reference.state_dict().items():
            yield name, values[name], wanted
        for (name, wanted), found in zip(reference.named_parameters(), ours.parameters(), strict=True):
            for key, value in optimizers[0].state[wanted].items():
                if isinstance(value, torch.Tensor):
                    yield f"{key} of {name}", optimizers[1].state[found][key], value


def run_round(seed: int, steps: int, verbose: bool, kind: str) -> dict[str, int]:
    """Runs a round in this process. Returns the counts of moves. A failure prints the command that repeats
    it."""
    torch.set_num_threads(1)  # a fixed order of additions
    faulthandler.enable()
    faulthandler.dump_traceback_later(ROUND_TIMEOUT, exit=True)
    current = None
    try:
        current = Round(seed, verbose, kind)
        current.run(steps)
        return {**current.moved, "out of memory": current.refused}
    except BaseException:
        if current is not None and not verbose:
            print("\n".join(current.history[-60:]))
        traceback.print_exc()
        print(
            f"FAILED round {seed}; again: python {sys.argv[0]} --round {seed} --device {kind} --verbose",
            flush=True,
        )
        raise
    finally:
        faulthandler.cancel_dump_traceback_later()


def in_a_child(seed: int, steps: int, kind: str) -> dict[str, int] | None:
    """Runs a round in a child, forked before the accelerator is used. Returns None if it failed."""
    sys.stdout.flush()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.write(write, json.dumps(run_round(seed, steps, False, kind)).encode())
            status = 0
        finally:
            sys.stdout.flush()
            os._exit(status)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != 0:
        print(f"round {seed} ended with status {status}", flush=True)
        return None
    figures: dict[str, int] = json.loads(answer)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000, help="in all (default: 10 000)")
    parser.add_argument("--seed", type=int, help="of the first round; default: from the clock")
    parser.add_argument("--steps-of-a-round", type=int, default=STEPS_OF_A_ROUND, help="default: %(default)s")
    parser.add_argument("--round", type=int, help="run the round of this seed, in this process, and no other")
    parser.add_argument("--device", choices=["emu", "cuda"], default="emu", help="default: %(default)s")
    parser.add_argument("--verbose", action="store_true", help="with --round: say what is done")
    options = parser.parse_args()
    if options.round is not None:
        print(run_round(options.round, options.steps_of_a_round, options.verbose, options.device))
        return 0
    seed = options.seed if options.seed is not None else time.time_ns() % (1 << 31)
    print(f"training soak: {options.steps} steps, seed {seed}", flush=True)
    began, done, failed = time.monotonic(), 0, []
    moved: Counter[str] = Counter()
    while done < options.steps:
        # A step does not depend on the number of steps, so any round can be repeated on its own.
        figures = in_a_child(seed, options.steps_of_a_round, options.device)
        if figures is None:
            failed.append(seed)
        moved.update(figures or {})
        seed += 1
        done += options.steps_of_a_round
        if done % (10 * options.steps_of_a_round) == 0:
            print(f"  {done} steps, next round {seed}", flush=True)
    print(
        f"{done} steps, {time.monotonic() - began:.0f} s; storages {dict(moved)}; failed: {failed or 'none'}"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
