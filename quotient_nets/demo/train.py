"""Train the digits transformer from scratch, in about half a minute on one core.

``python -m quotient_nets.demo.train`` writes ``digits_vit.safetensors`` to the working directory.
The same seed gives the same weights on the same machine and thread count; elsewhere rounding may
differ.

Imports: torch, and scikit-learn when training starts.
"""

import argparse
from collections.abc import Callable, Sequence
from importlib import metadata
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from quotient_nets.demo.digits import load_digits_split
from quotient_nets.demo.vit import DigitsViT
from quotient_nets.demo.weights import FILE_NAME, save_digits_vit

STEPS = 1800
BATCH_SIZE = 30
LEARNING_RATE = 3e-3
# Less decay costs test accuracy; more (.5) makes the query/key products nearly rank deficient, with
# condition numbers above 100, and a demo of their geometry should stay away from that edge.
WEIGHT_DECAY = 0.3


def train_digits_vit(
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
    *,
    max_steps: int | None = None,
) -> DigitsViT:
    """Train a fresh model on the training digits: AdamW, one learning-rate cycle, no augmentation.

    Args:
        seed: Draws the weights and the order of the batches; the global random state is left alone.
        progress: Called after each step with the steps done and their total.
        max_steps: Stop after this many steps of the full schedule.

    Returns:
        The model in evaluation mode. A full run ends with a training cross-entropy below 0.01.

    Raises:
        ValueError: ``max_steps`` is negative.
    """
    if max_steps is not None and max_steps < 0:
        raise ValueError(f"`max_steps` must not be negative; got {max_steps}. Leave it out for a full run.")
    images, labels, _, _ = load_digits_split()
    with torch.random.fork_rng(devices=()):
        # Not `torch.manual_seed`, which would also reseed the accelerators.
        torch.default_generator.manual_seed(seed)
        model = DigitsViT()
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=STEPS, pct_start=0.1)
    total = STEPS if max_steps is None else min(max_steps, STEPS)
    batches: list[Tensor] = []
    for step in range(total):
        if not batches:
            batches = list(torch.randperm(len(labels), generator=generator).split(BATCH_SIZE))
        batch = batches.pop()
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
        schedule.step()
        if progress is not None:
            progress(step + 1, total)
    return model.eval()


@torch.no_grad()
def evaluate(model: DigitsViT, images: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of a model, in the mode it is in."""
    logits = model(images)
    accuracy = (logits.argmax(dim=-1) == labels).double().mean()
    return cross_entropy(logits, labels).item(), accuracy.item()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command ``python -m quotient_nets.demo.train``.

    Args:
        arguments: Those of the command; by default those of the process.
    """
    parser = argparse.ArgumentParser(
        prog="python -m quotient_nets.demo.train", description="Train the digits transformer."
    )
    parser.add_argument("--out", type=Path, default=Path(FILE_NAME), help="file to write (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: %(default)s)")
    parser.add_argument("--force", action="store_true", help="replace an existing file")
    options = parser.parse_args(arguments)
    if options.out.exists() and not options.force:
        parser.error(f"{options.out} exists; choose another --out or replace it with --force")
    if not options.out.parent.is_dir():
        parser.error(f"there is no folder {options.out.parent}; make it first")

    # Sums over several threads round differently, and the shipped file should be reproducible.
    torch.set_num_threads(1)
    model = train_digits_vit(options.seed, progress=_print_progress)
    split = load_digits_split()
    train_loss, train_accuracy = evaluate(model, split.train_images, split.train_labels)
    test_loss, test_accuracy = evaluate(model, split.test_images, split.test_labels)
    print(f"train: loss {train_loss:.4f}, accuracy {train_accuracy:.2%}")
    print(f"test:  loss {test_loss:.4f}, accuracy {test_accuracy:.2%}")
    facts = {
        "seed": str(options.seed),
        "train_loss": f"{train_loss:.6f}",
        "test_accuracy": f"{test_accuracy:.6f}",
    }
    versions = {package: metadata.version(package) for package in ("torch", "numpy", "scikit-learn", "safetensors")}
    save_digits_vit(model, options.out, facts | versions, overwrite=options.force)
    print(f"wrote {options.out}")


def _print_progress(done: int, total: int) -> None:
    if done % 100 == 0 or done == total:
        print(f"step {done} of {total}", flush=True)


if __name__ == "__main__":
    main()
