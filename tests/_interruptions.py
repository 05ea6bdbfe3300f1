"""The prelude of processes that train under a budget and are interrupted: a snippet for `spawn`."""

from __future__ import annotations

PRELUDE = """
import contextlib, copy, gc, os, random, resource, signal, sys, threading, time, unittest
import torch, torch_uvm
from torch import nn
from torch_uvm import _C

torch.set_num_threads(1)
MIB = 1 << 20
torch.manual_seed(0)
layers = [part for _ in range(6) for part in (nn.Linear(512, 512), nn.ReLU())]
plain = nn.Sequential(*layers, nn.Linear(512, 10))
inputs = [torch.randn(16, 512) for _ in range(8)]

class Training:
    def __init__(self, device):
        self.device = device
        self.model = copy.deepcopy(plain).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self, number):
        self.optimizer.zero_grad()
        self.model(inputs[number % 8].to(self.device)).square().mean().backward()
        self.optimizer.step()

    def state(self):
        both = [self.model.state_dict(), self.optimizer.state_dict()]
        on_cpu = torch.utils._pytree.tree_map_only(torch.Tensor, lambda x: x.detach().cpu(), both)
        return copy.deepcopy(on_cpu)

    def load(self, state):
        state = copy.deepcopy(state)  # optimizers take over the tensors of step counts without a copy
        self.model.load_state_dict(state[0])
        self.optimizer.load_state_dict(state[1])

def same(one, other):
    pairs = zip(*(torch.utils._pytree.tree_leaves(each) for each in (one, other)), strict=True)
    return all(torch.equal(a, b) if torch.is_tensor(a) else a == b for a, b in pairs)

def alone(steps):
    torch_uvm.disable()
    reference = Training("cpu")
    for number in range(steps):
        reference.step(number)
    return reference.state()

def check():
    gc.collect()
    torch.emu.synchronize()
    for found in (_C.check_allocator(), _C.check_residency(), _C.emu_check_plain_allocator()):
        assert found is None, found

def under_a_budget(optimizer="in_place"):
    torch_uvm.enable(budget=8 * MIB, optimizer=optimizer)
    training = Training("emu")
    training.step(0)  # creates one-time objects
    torch_uvm.enable(budget=8 * MIB, optimizer=optimizer)
    again = Training("emu")
    del training
    return again
"""
