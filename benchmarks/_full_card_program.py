"""A user's program for full_card.py: trains a Llama, or generates with one. Ordinary PyTorch.

    python benchmarks/_full_card_program.py a [--steps N] [--seconds S] [--peer fsdp|torchao] [--tiny]

Prints a line of JSON when the model is made, and one after each step, so that a run that is cut off still
tells its steps.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

START = time.monotonic()
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for --deterministic, before CUDA starts

import torch  # noqa: E402
from torch import nn  # noqa: E402

Config = dict[str, int]
Step = Callable[[int], float]

SEVEN: Config = {  # Llama-2-7B
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}
FOURTEEN: Config = {  # Qwen2.5-14B, without its biases
    "vocab_size": 152064,
    "hidden_size": 5120,
    "intermediate_size": 13824,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
}
TINY: Config = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True)
class Row:
    """What a step does.

    Args:
        micro_batches: whose gradients a step adds up.
        shape: sequences and length of one of them; of a prompt, if new_tokens are generated.
        dtype: of parameters. Those in float32 compute in bfloat16 under autocast.
    """

    title: str
    config: Config
    dtype: torch.dtype
    micro_batches: int = 1
    shape: tuple[int, int] = (4, 2048)
    lora: bool = False
    new_tokens: int = 0

    def products_parameters(self) -> int:
        """Weights of the linear layers: those that each token of each pass uses."""
        width, heads = self.config["hidden_size"], self.config["num_attention_heads"]
        values = width // heads * self.config["num_key_value_heads"]
        layer = width * (2 * width + 2 * values + 3 * self.config["intermediate_size"])
        return self.config["num_hidden_layers"] * layer + width * self.config["vocab_size"]


ROWS = {
    "a": Row("7 B, fp32 under autocast, 8 192 tokens a step", SEVEN, torch.float32),
    "b": Row("7 B, fp32 under autocast, 65 536 tokens a step", SEVEN, torch.float32, micro_batches=8),
    "c": Row("14 B, bf16, 65 536 tokens a step", FOURTEEN, torch.bfloat16, micro_batches=8),
    "d": Row("7 B, bf16, 8 192 tokens a step", SEVEN, torch.bfloat16),
    "e": Row("LoRA on a frozen 14 B, bf16, 8 192 tokens a step", FOURTEEN, torch.bfloat16, lora=True),
    "f": Row("14 B, bf16, generating", FOURTEEN, torch.bfloat16, shape=(8, 256), new_tokens=32),
}


def tiny(row: Row) -> Row:
    """The same row in a few MiB, for rehearsals."""
    shape, new_tokens = ((2, 8), 4) if row.new_tokens else ((2, 32), 0)
    return Row(
        row.title, TINY, row.dtype, min(row.micro_batches, 2), shape, lora=row.lora, new_tokens=new_tokens
    )


@contextlib.contextmanager
def no_initialisation(dtype: torch.dtype) -> Iterator[None]:
    """A scope in which modules are made in this dtype and keep what their memory holds: random numbers for
    billions of parameters take minutes on a host."""
    names = ("kaiming_uniform_", "uniform_", "normal_")
    real = {name: getattr(nn.init, name) for name in names}
    for name in names:
        setattr(nn.init, name, lambda tensor, *args, **kwargs: tensor)
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
        for name in names:
            setattr(nn.init, name, real[name])


@torch.no_grad()
def fill(model: nn.Module, generator: torch.Generator) -> None:
    """Norms are 1. All other parameters repeat one tile of random numbers."""
    tiles: dict[torch.device, torch.Tensor] = {}
    numbers = torch.randn(1 << 20, generator=generator) * 0.02
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.fill_(1.0)
            continue
        tile = tiles.setdefault(parameter.device, numbers.to(parameter.device, parameter.dtype))
        for piece in parameter.view(-1).split(tile.numel()):
            piece.copy_(tile[: piece.numel()])


def make_model(row: Row, device: torch.device, generator: torch.Generator) -> nn.Module:
    import transformers

    class LlamaForCausalLM(transformers.LlamaForCausalLM):
        def init_weights(self) -> None: ...

    config = transformers.LlamaConfig(
        **row.config,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        use_cache=bool(row.new_tokens),
        attn_implementation="sdpa",
    )
    with no_initialisation(row.dtype), device:
        model: nn.Module = LlamaForCausalLM(config)
    fill(model, generator)
    if row.lora:
        from peft import LoraConfig, get_peft_model

        layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        lora = LoraConfig(r=16, lora_alpha=32, target_modules=layers, task_type="CAUSAL_LM")
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model


def flops_of_step(row: Row, model: nn.Module) -> float:
    """FLOPs of the model's products and of its causal attention. What a checkpoint computes again is not
    counted, nor are gradients of frozen weights."""
    weights = [
        (it.weight.numel(), it.weight.requires_grad) for it in model.modules() if isinstance(it, nn.Linear)
    ]
    layers, width = row.config["num_hidden_layers"], row.config["hidden_size"]
    sequences, length = row.shape
    if row.new_tokens:
        tokens = sequences * (length + row.new_tokens)
        return float(tokens * 2 * sum(count for count, _ in weights))
    tokens = row.micro_batches * sequences * length
    products = sum(count * (6 if trained else 4) for count, trained in weights)
    return float(tokens * (products + 6 * layers * width * length))


def shard(model: nn.Module, row: Row, device: torch.device) -> None:
    """FSDP2 on one rank: parameters, gradients and optimizer state are on the host."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", RANK="0", WORLD_SIZE="1")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=device.type == "cuda"),
    }
    if row.dtype == torch.float32:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    base: Any = model.get_base_model() if row.lora else model  # type: ignore[operator]
    for block in base.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)


def make_optimizer(model: nn.Module, row: Row, peer: str | None) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    options: dict[str, Any] = {"lr": 1e-5, "fused": True}
    if peer != "torchao":
        return torch.optim.AdamW(trained, **options)
    made: torch.optim.Optimizer = importlib.import_module("torchao.optim").CPUOffloadOptimizer(
        trained, torch.optim.AdamW, offload_gradients=row.micro_batches == 1, **options
    )
    return made


def random_tokens(row: Row, seed: int) -> torch.Tensor:
    return torch.randint(
        0, row.config["vocab_size"], row.shape, generator=torch.Generator().manual_seed(seed)
    )


def training(row: Row, model: nn.Module, device: torch.device, peer: str | None) -> Step:
    """A function that runs a step and returns its loss."""
    batches = [
        [random_tokens(row, row.micro_batches * number + micro) for micro in range(row.micro_batches)]
        for number in range(4)
    ]
    casts = row.dtype == torch.float32 and peer != "fsdp"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})  # type: ignore[operator]
    model.train()
    optimizer = make_optimizer(model, row, peer)

    def step(number: int) -> float:
        losses = []
        for tokens in batches[number % len(batches)]:
            x = tokens.to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=casts):
                loss = model(input_ids=x, labels=x).loss / row.micro_batches
            loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(map(float, losses))

    return step


def generating(row: Row, model: nn.Module, device: torch.device) -> Step:
    """A function that generates once, greedily, and returns the sum of the tokens' numbers."""
    prompts = [random_tokens(row, number) for number in range(4)]
    model.eval()
    options = {"min_new_tokens": row.new_tokens, "max_new_tokens": row.new_tokens, "pad_token_id": 0}

    def step(number: int) -> float:
        x = prompts[number % len(prompts)].to(device)
        mask = torch.ones_like(x)
        found = model.generate(x, attention_mask=mask, do_sample=False, **options)  # type: ignore[operator]
        return float(found[:, row.shape[1] :].sum())

    return step


def matrix_rate(device: torch.device, size: int, seconds: float) -> float:
    """FLOP/s of a product of random bfloat16 matrices: the median of groups of 8."""
    left, right = (torch.randn(size, size, device=device).bfloat16() for _ in range(2))
    groups: list[float] = []
    begin = time.monotonic()
    while time.monotonic() - begin < seconds or len(groups) < 3:
        torch.accelerator.synchronize()
        before = time.monotonic()
        for _ in range(8):
            torch.mm(left, right)
        torch.accelerator.synchronize()
        groups.append(time.monotonic() - before)
    return 8 * 2 * size**3 / sorted(groups)[len(groups) // 2]


def say(what: str, **facts: Any) -> None:
    facts |= {
        "at_s": time.monotonic() - START,
        "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }
    print(json.dumps({"what": what} | facts), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0], allow_abbrev=False)
    parser.add_argument("row", choices=[*ROWS, "rate"], help="rate: measure matrix products and nothing else")
    parser.add_argument("--steps", type=int, default=1 << 30)
    parser.add_argument("--seconds", type=float, default=1e9, help="no step begins that would end later")
    parser.add_argument("--peer", choices=["fsdp", "torchao"])
    parser.add_argument("--cap", type=int, help="the most bytes of the device that PyTorch may take")
    parser.add_argument("--deterministic", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="a rehearsal")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator()
    assert device is not None, "there is no accelerator"
    if args.row == "rate":
        return say("rate", flops=matrix_rate(device, 256 if args.tiny else 8192, 0.1 if args.tiny else 3))
    if args.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        torch.backends.cuda.enable_flash_sdp(False)  # their backward adds in any order
        torch.backends.cuda.enable_mem_efficient_sdp(False)
        torch.backends.cuda.enable_cudnn_sdp(False)
    if args.cap is not None and device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(args.cap / torch.cuda.mem_get_info()[1])
    row = tiny(ROWS[args.row]) if args.tiny else ROWS[args.row]
    torch.manual_seed(0)
    home = torch.device("cpu") if args.peer == "fsdp" else device
    model = make_model(row, home, torch.Generator().manual_seed(1))
    tokens = row.shape[0] * (row.new_tokens or row.micro_batches * row.shape[1])
    parameters = sum(parameter.numel() for parameter in model.parameters())
    say("made", parameters=parameters, tokens=tokens, flops=flops_of_step(row, model))
    if args.peer == "fsdp":
        shard(model, row, device)
    with torch.set_grad_enabled(not row.new_tokens):
        step = generating(row, model, device) if row.new_tokens else training(row, model, device, args.peer)
        took = 0.0
        for number in range(args.steps):
            begin = time.monotonic()
            if begin - START + took > args.seconds:
                break
            result = step(number)
            torch.accelerator.synchronize()
            took = time.monotonic() - begin
            say("step", seconds=took, result=result.hex())


if __name__ == "__main__":
    main()
