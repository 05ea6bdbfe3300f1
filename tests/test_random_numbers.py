"""Random numbers on the emulated accelerator: equal to the CPU's for the same seed, from an own generator."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from _spawn import Spawn

import torch_uvm

emu: Any = torch.get_device_module("emu")


@pytest.fixture(params=["plain", "managed"], autouse=True)
def memory(request: pytest.FixtureRequest) -> Iterator[None]:
    with torch_uvm.enabled() if request.param == "managed" else torch_uvm.disabled():
        yield


def _multihead(device: str) -> torch.Tensor:
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True).to(device)
    torch.manual_seed(2)
    return torch.as_tensor(layer(torch.ones(2, 3, 8, device=device)))


def _recurrent(device: str) -> torch.Tensor:
    torch.manual_seed(1)
    layer = torch.nn.LSTM(4, 4, num_layers=2, dropout=0.5).to(device)
    torch.manual_seed(2)
    return torch.as_tensor(layer(torch.ones(3, 2, 4, device=device))[0])


DRAWS: dict[str, Callable[[str], torch.Tensor]] = {
    "rand": lambda on: torch.rand(1000, device=on),
    "randn": lambda on: torch.randn(1000, device=on),
    "randn double": lambda on: torch.randn(10, dtype=torch.float64, device=on),
    "randint": lambda on: torch.randint(-5, 1000, (100,), device=on),
    "randperm": lambda on: torch.randperm(100, device=on),
    "rand_like": lambda on: torch.rand_like(torch.ones(3, 5, device=on).t()),
    "bernoulli": lambda on: torch.bernoulli(torch.full((100,), 0.3, device=on)),
    "bernoulli_": lambda on: torch.empty(100, device=on).bernoulli_(0.3),
    "multinomial": lambda on: torch.multinomial(torch.arange(1.0, 20, device=on), 10),
    "multinomial replaced": lambda on: torch.multinomial(torch.ones(2, 5, device=on), 20, replacement=True),
    "normal": lambda on: torch.normal(torch.zeros(50, device=on), torch.ones(50, device=on)),
    "normal_": lambda on: torch.empty(7, 3, device=on).normal_(2, 3),
    "uniform_": lambda on: torch.empty(33, device=on).uniform_(-1, 1),
    "exponential_": lambda on: torch.empty(33, device=on).exponential_(2),
    "geometric_": lambda on: torch.empty(33, device=on).geometric_(0.2),
    "cauchy_": lambda on: torch.empty(33, device=on).cauchy_(),
    "log_normal_": lambda on: torch.empty(33, device=on).log_normal_(),
    "random_": lambda on: torch.empty(33, device=on).random_(7),
    "poisson": lambda on: torch.poisson(torch.full((50,), 4.0, device=on)),
    "dropout": lambda on: torch.dropout(torch.ones(1000, device=on), 0.4, True),
    "dropout_": lambda on: torch.nn.functional.dropout(torch.ones(1000, device=on), 0.4, inplace=True),
    "native_dropout": lambda on: torch.native_dropout(torch.ones(100, device=on), 0.4, True)[0],
    "dropout2d": lambda on: torch.nn.functional.dropout2d(torch.ones(2, 8, 3, 3, device=on), 0.4),
    "alpha_dropout": lambda on: torch.nn.functional.alpha_dropout(torch.ones(50, device=on), 0.4, True),
    "rrelu": lambda on: torch.nn.functional.rrelu(-torch.ones(50, device=on), training=True),
    "gumbel_softmax": lambda on: torch.nn.functional.gumbel_softmax(torch.ones(5, 5, device=on)),
    "transformer layer": _multihead,
    "recurrent dropout": _recurrent,
    "kaiming": lambda on: torch.nn.init.kaiming_uniform_(torch.empty(4, 4, device=on)),
}


class TestDraws:
    @pytest.mark.parametrize("name", DRAWS)
    def test_equal_the_cpus_for_the_same_seed(self, name: str) -> None:
        torch.manual_seed(42)
        expected = DRAWS[name]("cpu")
        torch.manual_seed(42)
        drawn = DRAWS[name]("emu")
        assert drawn.device.type == "emu"
        # The roundings of recurrent layers differ.
        tolerance = 1e-5 if name == "recurrent dropout" else 0.0
        torch.testing.assert_close(drawn.cpu(), expected, rtol=tolerance, atol=tolerance, equal_nan=True)

    @pytest.mark.parametrize("name", sorted(set(DRAWS) - {"transformer layer", "recurrent dropout"}))
    def test_use_the_devices_generator_only(self, name: str) -> None:
        """The CPU's generator is not advanced. The device's generator is: two draws differ."""
        torch.manual_seed(42)
        host, there = torch.get_rng_state(), emu.get_rng_state()
        DRAWS[name]("emu")
        assert torch.equal(torch.get_rng_state(), host)
        assert not torch.equal(emu.get_rng_state(), there)

    @pytest.mark.parametrize("layer", ["transformer", "lstm"])
    def test_of_whole_layers_do_not_use_the_cpus_generator(self, layer: str) -> None:
        module: Any = (
            torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5)
            if layer == "transformer"
            else torch.nn.LSTM(8, 8, num_layers=2, dropout=0.5)
        )
        module.to("emu")
        x = torch.ones(3, 2, 8, device="emu", requires_grad=True)
        host, there = torch.get_rng_state(), emu.get_rng_state()
        out = module(x)
        (out if layer == "transformer" else out[0]).sum().backward()
        assert torch.equal(torch.get_rng_state(), host)
        assert not torch.equal(emu.get_rng_state(), there)

    def test_draws_advance_the_generator(self) -> None:
        torch.manual_seed(1)
        emu_numbers = [torch.rand(3, device="emu").tolist() for _ in range(3)]
        torch.manual_seed(1)
        assert emu_numbers == [torch.rand(3).tolist() for _ in range(3)]
        assert emu_numbers[0] != emu_numbers[1]

    def test_nothing_is_drawn_in_eval_mode(self) -> None:
        before = emu.get_rng_state()
        torch.nn.functional.dropout(torch.ones(9, device="emu"), 0.5, training=False)
        assert torch.equal(emu.get_rng_state(), before)


class TestSeeds:
    def test_manual_seed_of_torch_seeds_the_device(self) -> None:
        torch.manual_seed(123)
        assert emu.initial_seed() == 123

    def test_manual_seed_of_the_module_leaves_the_cpu_alone(self) -> None:
        torch.manual_seed(1)
        host = torch.get_rng_state()
        emu.manual_seed(77)
        assert emu.initial_seed() == 77 and torch.equal(torch.get_rng_state(), host)
        emu.manual_seed_all(78)
        assert emu.initial_seed() == 78 and torch.initial_seed() == 1

    def test_seed_draws_a_random_seed(self) -> None:
        emu.manual_seed(1)
        emu.seed()
        first = emu.initial_seed()
        emu.seed_all()
        assert len({1, first, emu.initial_seed()}) == 3

    def test_two_devices_have_a_generator_each(self, spawn: Spawn) -> None:
        spawn(
            """
            import torch, torch_uvm, unittest
            emu = torch.get_device_module("emu")
            torch.manual_seed(5)
            assert torch.rand(4, device="emu:0").tolist() == torch.rand(4, device="emu:1").tolist()
            states = emu.get_rng_state_all()
            assert len(states) == len(emu.default_generators) == 2 and torch.equal(*states)
            torch.rand(1, device="emu:1")
            assert not torch.equal(emu.get_rng_state(0), emu.get_rng_state("emu:1"))
            emu.set_rng_state_all(states)
            assert torch.equal(emu.get_rng_state(0), emu.get_rng_state(1))
            with emu.device(1):
                emu.manual_seed(9)
            assert [g.initial_seed() for g in emu.default_generators] == [5, 9]
            generator = torch.Generator("emu:1").manual_seed(2)
            drawn = torch.rand(3, device="emu:0", generator=generator)  # as with CUDA
            assert drawn.device == torch.device("emu", 0)
            assert drawn.tolist() == torch.rand(3, generator=torch.Generator().manual_seed(2)).tolist()
            assert torch.randperm(9, device="emu:0", generator=generator).device.index == 0
            wrong = "Expected a 'emu' device type for generator"
            with unittest.TestCase().assertRaisesRegex(RuntimeError, wrong):
                torch.rand(3, device="emu:0", generator=torch.Generator())
            with torch.random.fork_rng(devices=[1], device_type="emu"):
                torch.rand(1, device="emu:1"); torch.rand(1, device="emu:0")
            assert emu.get_rng_state(1).tolist() != emu.get_rng_state(0).tolist()
            """,
            env={"TORCH_UVM_CONF": "emulated_devices:2"},
        )


class TestStates:
    def test_states_are_saved_and_restored(self) -> None:
        state = emu.get_rng_state()
        assert state.is_cpu and state.dtype == torch.uint8 and state.dim() == 1
        first = torch.rand(5, device="emu")
        second = torch.rand(5, device="emu")
        emu.set_rng_state(state)
        assert torch.equal(torch.rand(5, device="emu"), first)
        assert torch.equal(torch.rand(5, device="emu"), second)

    def test_fork_rng_restores_both(self) -> None:
        host, there = torch.get_rng_state(), emu.get_rng_state()
        with torch.random.fork_rng(device_type="emu"):
            torch.manual_seed(3)
            torch.rand(3, device="emu")
            torch.rand(3)
        assert torch.equal(torch.get_rng_state(), host) and torch.equal(emu.get_rng_state(), there)

    def test_checkpoint_replays_dropout(self) -> None:
        x = torch.ones(200, device="emu", requires_grad=True)
        out = torch.utils.checkpoint.checkpoint(
            lambda t: torch.nn.functional.dropout(t * 2, 0.5), x, use_reentrant=False
        )
        out.sum().backward()
        assert x.grad is not None and torch.equal(x.grad, out.detach()), "both passes drop the same elements"


class TestGenerators:
    def test_are_of_the_device(self) -> None:
        generator = torch.Generator("emu")
        assert generator.device == torch.device("emu", 0)
        assert generator.manual_seed(5).initial_seed() == 5

    def test_draw_the_same_numbers_as_the_cpus(self) -> None:
        ours, cpus = torch.Generator("emu").manual_seed(5), torch.Generator().manual_seed(5)
        before = emu.get_rng_state()
        for _ in range(2):
            assert torch.equal(
                torch.rand(9, device="emu", generator=ours).cpu(), torch.rand(9, generator=cpus)
            )
        drawn = torch.randperm(9, device="emu", generator=ours)
        assert torch.equal(drawn.cpu(), torch.randperm(9, generator=cpus))
        drawn = torch.empty(9, device="emu").normal_(generator=ours)
        assert torch.equal(drawn.cpu(), torch.empty(9).normal_(generator=cpus))
        assert torch.equal(emu.get_rng_state(), before), "the default generator is not used"

    def test_states_copy(self) -> None:
        a, b = torch.Generator("emu").manual_seed(5), torch.Generator("emu")
        torch.rand(3, device="emu", generator=a)
        b.set_state(a.get_state())
        c = a.clone_state()
        drawn = [torch.rand(3, device="emu", generator=g).tolist() for g in (a, b, c)]
        assert drawn[0] == drawn[1] == drawn[2]

    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))])
    def test_can_be_pickled(self, copied: Callable[[torch.Generator], torch.Generator]) -> None:
        generator = torch.Generator("emu").manual_seed(5)
        torch.rand(3, device="emu", generator=generator)
        other = copied(generator)
        assert other.device == generator.device and other is not generator
        drawn = [torch.rand(3, device="emu", generator=g).tolist() for g in (generator, other)]
        assert drawn[0] == drawn[1]

    def test_of_the_cpu_are_refused(self) -> None:
        generator = torch.Generator()
        state = generator.get_state()
        calls: list[Callable[[], Any]] = [
            lambda: torch.rand(3, device="emu", generator=generator),
            lambda: torch.randperm(3, device="emu", generator=generator),
            lambda: torch.ones(3, device="emu").normal_(generator=generator),
            lambda: torch.bernoulli(torch.ones(3, device="emu"), generator=generator),
            lambda: torch.multinomial(torch.ones(3, device="emu"), 1, generator=generator),
        ]
        for call in calls:
            with pytest.raises(
                RuntimeError, match="Expected a 'emu' device type for generator but found 'cpu'"
            ):
                call()
        assert torch.equal(generator.get_state(), state)

    def test_are_refused_by_the_cpu(self) -> None:
        with pytest.raises(RuntimeError):
            torch.rand(3, generator=torch.Generator("emu"))

    def test_shuffle_a_data_loader(self) -> None:
        generator = torch.Generator().manual_seed(3)
        data: Any = list(range(20))
        loader: Any = torch.utils.data.DataLoader(data, batch_size=20, shuffle=True, generator=generator)
        host = torch.get_rng_state()
        first, second = next(iter(loader)), next(iter(loader))
        assert sorted(first.tolist()) == list(range(20)) and first.tolist() != second.tolist()
        assert torch.equal(torch.get_rng_state(), host)
