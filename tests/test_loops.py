"""Every kind of training loop gets a schedule: operators come as planned from the fifth iteration on.

Loops are recognised by their operators. An optimizer's step is a hint at most: some loops have none, some
have one for each parameter.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from _budget_programs import DEVICE, MIB, gpt, mlp, tokens, vectors
from _budget_programs import no_budget_afterwards as no_budget_afterwards
from _spawn import Spawn
from torch import Tensor, nn
from torch.nn import functional as F

import torch_uvm

Loop = Iterator[Tensor]  #: one result per iteration
PLANNED = 0.95  #: of the operators
WARM_UP = 4  #: iterations


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=True)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    output = model(batch.to("emu"))
    return F.cross_entropy(output, torch.zeros(len(output), dtype=torch.long, device="emu"))


def one_optimizer(
    iterations: int,
    make_model: Callable[[], nn.Module] = mlp,
    make_batch: Callable[[int], Tensor] = vectors,
    sizes: Callable[[], int] = lambda: 64,
    accumulate: int = 1,
    evaluate_every: int = 0,
) -> Loop:
    model = make_model().to("emu")
    optimizer = adamw(model.parameters())
    for iteration in range(1, iterations + 1):
        for _ in range(accumulate):
            loss = loss_of(model, make_batch(sizes())) / accumulate
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if evaluate_every and iteration % evaluate_every == 0:
            with torch.no_grad():
                loss = loss_of(model.eval(), make_batch(sizes()))
            model.train()
        yield loss.detach()


def one_optimizer_a_parameter(iterations: int) -> Loop:
    """PyTorch's recipe: each parameter is updated in a hook, once its gradient is complete."""
    model = mlp().to("emu")
    optimizers = {each: adamw([each]) for each in model.parameters()}

    def update(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    hooks = [each.register_post_accumulate_grad_hook(update) for each in model.parameters()]
    for _ in range(iterations):
        loss = loss_of(model, vectors())
        loss.backward()
        yield loss.detach()
    for hook in hooks:
        hook.remove()


def two_in_turn(iterations: int) -> Loop:
    """A generator and a discriminator, each with its optimizer."""
    maker = nn.Sequential(mlp(512, 4), nn.Linear(10, 512)).to("emu")
    judge = mlp(512, 4).to("emu")
    optimizers = [adamw(maker.parameters()), adamw(judge.parameters())]
    for _ in range(iterations):
        noise, real = (torch.randn(32, 512).to("emu") for _ in range(2))
        (loss_of(judge, real) + loss_of(judge, maker(noise).detach())).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        loss = loss_of(judge, maker(noise))
        loss.backward()
        optimizers[0].step()
        for each in optimizers:
            each.zero_grad()
        yield loss.detach()


def no_optimizer(iterations: int) -> Loop:
    model = mlp(512, 20).to("emu")
    for _ in range(iterations):
        with torch.no_grad():
            yield loss_of(model, torch.randn(64, 512))


def growing_cache(iterations: int, layers: int = 3, width: int = 512, heads: int = 8, batch: int = 8) -> Loop:
    """Decoding: every layer adds the keys and values of one token to its cache, behind those of a prompt."""
    project = [nn.Linear(width, 3 * width).to("emu") for _ in range(layers)]
    join = [nn.Linear(width, width).to("emu") for _ in range(layers)]
    cache = [
        [torch.randn(batch, heads, 32, width // heads).to("emu") for _ in range(2)] for _ in range(layers)
    ]
    x = torch.randn(batch, 1, width).to("emu")
    for _ in range(iterations):
        with torch.no_grad():
            for layer in range(layers):
                projected = project[layer](x).chunk(3, -1)
                query, *new = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in projected)
                cache[layer] = [torch.cat(pair, 2) for pair in zip(cache[layer], new, strict=True)]
                keys, values = cache[layer]
                attended = F.scaled_dot_product_attention(query, keys, values)
                x = x + join[layer](attended.transpose(1, 2).flatten(2))
        yield x


def any_order(*sizes: int) -> Callable[[], int]:
    """Each of the sizes, in an order that does not repeat."""
    chance = random.Random(0)
    return lambda: chance.choice(sizes)


LOOPS: dict[str, Callable[[int], Loop]] = {
    "one optimizer": one_optimizer,
    "one optimizer, attention": lambda n: one_optimizer(n, gpt, tokens, lambda: 16),
    "one optimizer a parameter": one_optimizer_a_parameter,
    "two in turn": two_in_turn,
    "accumulation": lambda n: one_optimizer(n, accumulate=3),
    "evaluation every third": lambda n: one_optimizer(n, evaluate_every=3),
    "no optimizer": no_optimizer,
    "growing cache": growing_cache,
}


@dataclass
class Seen:
    results: list[Tensor] = field(default_factory=list)
    peak: int = 0
    planned: list[tuple[int, int]] = field(default_factory=list)  #: of each iteration: planned operators, all
    link: list[int] = field(default_factory=list)  #: of each iteration: bytes, both ways


def follow(make: Callable[[int], Loop], iterations: int, budget: int | None) -> Seen:
    gc.collect()
    torch_uvm.memory.empty_cache()
    torch_uvm.memory.reset_peak_memory_stats()
    torch_uvm.enable(budget=budget, optimizer="in_place")  # "auto" begins to defer, which is another loop
    torch_uvm.memory.reset_residency_stats()
    torch.manual_seed(0)
    seen = Seen()
    before = (0, 0, 0)
    for result in make(iterations):
        seen.results.append(result.cpu())
        stats = torch_uvm.stats()
        link = sum(stats[name]["bytes"] for name in ("fetched", "written_back", "used_in_place"))
        now = (stats["plan_hits"], stats["plan_hits"] + stats["plan_misses"], link)
        hits, operators, moved = (after - earlier for after, earlier in zip(now, before, strict=True))
        seen.planned.append((hits, operators))
        seen.link.append(moved)
        before = now
    seen.peak = torch_uvm.memory.max_memory_allocated(DEVICE)
    torch_uvm.set_budget(None)
    return seen


def within(make: Callable[[int], Loop], iterations: int) -> Seen:
    """The loop within 0.6 of its peak. Its results are those without a budget."""
    free = follow(make, iterations, None)
    budget = max(int(0.6 * free.peak), 8 * MIB)
    assert budget < free.peak
    seen = follow(make, iterations, budget)
    assert len(seen.results) == len(free.results) == iterations
    for result, wanted in zip(seen.results, free.results, strict=True):
        assert torch.equal(result, wanted)
    assert sum(seen.link) > 0
    return seen


def share(planned: list[tuple[int, int]]) -> float:
    return sum(hits for hits, _ in planned) / sum(operators for _, operators in planned)


@pytest.mark.parametrize("kind", LOOPS)
def test_operators_are_planned_from_the_fifth_iteration(kind: str) -> None:
    seen = within(LOOPS[kind], 12)
    assert share(seen.planned[WARM_UP:]) >= PLANNED, seen.planned


@pytest.mark.parametrize("kind", ["vectors", "tokens"])
def test_a_schedule_for_each_of_several_batch_shapes(kind: str) -> None:
    order: list[int] = []
    choose = any_order(*((32, 64, 96) if kind == "vectors" else (8, 16, 24)))

    def sizes() -> int:
        order.append(choose())
        return order[-1]

    model, batch = (mlp, vectors) if kind == "vectors" else (gpt, tokens)
    seen = follow(lambda n: one_optimizer(n, model, batch, sizes), 30, 32 * MIB)
    known = [at for at, size in enumerate(order) if order[:at].count(size) >= WARM_UP]
    assert len(known) > 15
    assert share([seen.planned[at] for at in known]) >= PLANNED, list(zip(order, seen.planned, strict=True))


def test_updates_in_hooks_move_no_more_than_one_update_at_the_end(spawn: Spawn) -> None:
    """Each in a process of its own: a loop that was run before may be planned as a part of more."""
    ordinary, hooks = (
        int(
            spawn(f"""
                import sys
                sys.path.insert(0, {str(Path(__file__).parent)!r})
                from test_loops import LOOPS, WARM_UP, within
                print(sum(within(LOOPS[{kind!r}], 12).link[WARM_UP:]))
            """).stdout
        )
        for kind in ("one optimizer", "one optimizer a parameter")
    )
    assert hooks <= 1.05 * ordinary


@pytest.mark.parametrize("kind", ["one optimizer", "two in turn"])
def test_a_loop_moves_about_as_much_when_the_whole_run_is_repeated(kind: str) -> None:
    first, *later = (sum(within(LOOPS[kind], 12).link[WARM_UP:]) for _ in range(4))
    assert max(later) <= 1.5 * first


def test_a_growing_cache_moves_what_the_budget_lacks() -> None:
    """What lacks room leaves once a step and comes back. The whole cache would be twice as much at least."""

    def decoding(iterations: int) -> Loop:
        return growing_cache(iterations, layers=8, batch=32)

    peak = follow(decoding, 12, None).peak
    seen = within(decoding, 12)
    moved = sum(seen.link[WARM_UP:]) / len(seen.link[WARM_UP:])
    assert moved <= 2.2 * 0.4 * peak
