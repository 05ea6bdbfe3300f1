"""Fine-tunes a causal language model by LoRA, with Hugging Face's Trainer, accelerate and PEFT.

An ordinary script: the model is a small Llama made from its configuration, with random weights, and a token
is a byte of Python's standard library, so nothing is downloaded. It saves checkpoints, and can resume from
one:

    python examples/finetune_lora.py --steps 8 --save-steps 4 --output runs
    python examples/finetune_lora.py --steps 8 --output runs --resume runs/checkpoint-4

The same arguments give the same losses to the last bit, also when resumed. The Trainer's checkpoints do not
contain the random state of a device that it does not know, so the model has no dropout.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from train_gpt import VOCABULARY, default_device, standard_library

# accelerate knows its own accelerators by name. This variable selects another one, also for the Trainer.
if default_device().type not in ("cpu", "cuda"):
    os.environ.setdefault("ACCELERATE_TORCH_DEVICE", default_device().type)

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class Windows(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Consecutive windows of text; the Trainer shuffles them."""

    def __init__(self, text: Tensor, length: int) -> None:
        self.rows = text[: len(text) // length * length].view(-1, length).long()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class RecordingTrainer(Trainer):
    """Records the exact losses; the Trainer's log may round them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: dict[int, Tensor] = {}  # by step number, from 1 on

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **kwargs)
        self.losses[self.state.global_step + 1] = loss.detach()
        return loss


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=4 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads,
        max_position_embeddings=args.context,
        use_cache=False,
    )
    lora = LoraConfig(
        r=args.rank, lora_alpha=2 * args.rank, target_modules=PROJECTIONS, task_type="CAUSAL_LM"
    )
    model: torch.nn.Module = get_peft_model(LlamaForCausalLM(config), lora)
    return model


def trained_bytes(model: torch.nn.Module) -> str:
    """A digest of the trained weights."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        if parameter.requires_grad:
            digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest()


def train(args: argparse.Namespace) -> dict[str, object]:
    model = make_model(args)
    settings = TrainingArguments(
        output_dir=str(args.output),
        max_steps=args.steps,
        per_device_train_batch_size=args.batch,
        learning_rate=1e-3,
        warmup_steps=1,
        lr_scheduler_type="cosine",
        logging_steps=1,
        save_steps=args.save_steps,
        seed=args.seed,
        full_determinism=True,
        report_to="none",
    )
    text, _ = standard_library(args.data_bytes)
    trainer = RecordingTrainer(model=model, args=settings, train_dataset=Windows(text, args.context))
    size = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    print(
        f"{size / 1e6:.1f} M parameters, {trained / 1e6:.2f} M of them trained, on {settings.device}",
        flush=True,
    )
    begin = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(args.resume) if args.resume else None)
    seconds = time.perf_counter() - begin
    losses = {step: float(loss) for step, loss in trainer.losses.items()}
    for step, value in losses.items():
        print(f"step {step}: loss {value!r}")
    print(f"{len(losses)} steps, {seconds:.1f} s; checkpoints in {args.output}", flush=True)
    return {
        "losses_hex": {step: value.hex() for step, value in losses.items()},
        "trained_sha256": trained_bytes(model),
        "device": str(next(model.parameters()).device),
        "seconds": seconds,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tunes a causal language model by LoRA, with Hugging Face's libraries.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--output", type=Path, default="lora-output", metavar="FOLDER", help="for checkpoints"
    )
    parser.add_argument("--resume", type=Path, metavar="FOLDER", help="go on from this checkpoint")
    parser.add_argument("--steps", type=int, default=8, help="optimizer steps, with those before --resume")
    parser.add_argument("--save-steps", type=int, default=4, help="steps between checkpoints")
    parser.add_argument("--batch", type=int, default=4, help="windows of text a step")
    parser.add_argument("--context", type=int, default=128, help="bytes a window")
    parser.add_argument("--layers", type=int, default=6, help="transformer blocks")
    parser.add_argument("--heads", type=int, default=8, help="attention heads; they divide the width")
    parser.add_argument("--width", type=int, default=256, help="features a token")
    parser.add_argument("--rank", type=int, default=8, help="of LoRA's matrices")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and of the order of the data")
    parser.add_argument("--data-bytes", type=int, default=500_000, help="stop reading files after this many")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write losses and times there")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    result = train(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
