"""Pictures a second of damcha_vit_tiny_patch16_224 against timm's vit_tiny_patch16_224, interleaved in one run.

python benchmarks/vit_throughput.py                  # inference and training, batch 8, all cores
"""

import argparse
import statistics
import time
from collections.abc import Callable

import timm
import torch
import torch.nn.functional as F

import zoo  # noqa: F401  (registers the models)

MODES = {
    "DAMCHA, shared": {},
    "DAMCHA, independent": {"share_mlp": False},
    "static": {"use_mlp": False},
}


def infer(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    model.eval()

    @torch.inference_mode()
    def step() -> None:
        model(x)

    return step


def train(model: torch.nn.Module, x: torch.Tensor) -> Callable[[], None]:
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    target = torch.randint(1000, (len(x),))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, help="default: PyTorch's")
    chosen = parser.parse_args()
    if chosen.threads:
        torch.set_num_threads(chosen.threads)
    x = torch.randn(chosen.batch, 3, 224, 224)
    print(f"torch {torch.__version__}, timm {timm.__version__}, {torch.get_num_threads()} threads, float32, CPU")
    for title, prepare in (("inference", infer), ("training", train)):
        torch.manual_seed(0)
        models = {"timm's": timm.create_model("vit_tiny_patch16_224")}
        models |= {name: timm.create_model("damcha_vit_tiny_patch16_224", **options) for name, options in MODES.items()}
        steps = {name: prepare(model, x) for name, model in models.items()}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(chosen.rounds + 2):  # two to warm up
            for name, step in steps.items():
                start = time.perf_counter()
                step()
                seconds[name].append(time.perf_counter() - start)
        for name, times in seconds.items():
            # the ratio within each round, so that a busy moment of the machine counts on both sides
            ratios = [base / own for base, own in zip(seconds["timm's"][2:], times[2:], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4) if name != "timm's" else (1, 1, 1)
            print(f"{title}: {name}: {middle:.3f} times timm's pictures a second (quartiles {low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()
