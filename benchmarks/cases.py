"""What is measured: each case is a line or more of the table that ``run.py`` prints."""

import importlib.util
import logging
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle, islice
from typing import Any

import lightning.pytorch as pl
import timm
import torch
import torch.nn.functional as F
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import move_data_to_device
from literal import DenseMasked, LiteralDecoder, disjoint_union, power_law_graph
from measure import Aim, Build, Case, Step
from torch import Tensor, nn
from torch.utils.data import DataLoader

from datamodules import GraphTableDataModule, ImageDataModule, TextDataModule
from zoo.attention.packed import PackedMultiheadAttention
from zoo.models.decoder import Decoder, DecoderCache, LanguageModel
from zoo.tasks import GraphPredictionTask, ImageClassificationTask, LanguageModelTask

STANDARD = {"use_M": False, "use_mlp": False, "share_mlp": False}
SKIPPED, STEPS = 4, 16  # steps of a Lightning run before the watch starts, and after
CASES: dict[str, Case] = {}
warnings.filterwarnings("ignore", module="lightning|torch")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def case(*args: Any, **kwargs: Any) -> None:
    new = Case(*args, **kwargs)
    CASES[new.name] = new


# ---------------------------------------------------------------------- language


def backward_of(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> Build:
    """Forward and backward, gradients of inputs and parameters."""

    def build(device: str) -> Step:
        torch.manual_seed(0)
        module = make().to(device)
        x = torch.randn(shape, device=device, requires_grad=True)

        def step() -> None:
            module(x).square().mean().backward()
            module.zero_grad()
            x.grad = None

        return step

    return build


def decoder(D: int, layers: int, heads: int, **options: Any) -> Decoder:
    return Decoder(D, heads, 4 * D, layers, **{"dropout": 0.0, "mlp_hidden": (64,), **options})


def literal(*args: Any, **options: Any) -> LiteralDecoder:
    return LiteralDecoder(decoder(*args, **options))


for generator, hidden, sharing in (("", (64,), (True, False)), ("-wide", (256, 512), (True,))):
    for share in sharing:
        name, factor = ("shared", 8.0) if share else ("independent", 6.0)
        sizes = {"share_mlp": share, "mlp_hidden": hidden}
        case(
            f"decoder-{name}{generator}",
            f"decoder fwd + bwd, {name} metrics, B 4, T 1024, D 128, 4 layers, generator {'-'.join(map(str, hidden))}",
            {
                "zoo": backward_of(partial(decoder, 128, 4, 4, **sizes), (4, 1024, 128)),
                "as written": backward_of(partial(literal, 128, 4, 4, **sizes), (4, 1024, 128)),
            },
            [Aim("as written", at_least=factor, memory_at_most=0.25)],
            memory=["as written"],
        )


def training_step(B: int, T: int, D: int, layers: int, heads: int, **options: Any) -> Build:
    """A whole step: forward, loss, backward, AdamW."""

    def build(device: str) -> Step:
        torch.manual_seed(0)
        model = LanguageModel(
            256, D, heads, 4 * D, layers, max_len=T, **{"dropout": 0.0, "mlp_hidden": (64,), **options}
        ).to(device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.randint(256, (B, T + 1), device=device)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()

        return step

    return build


def step_operations(T: int, D: int, layers: int, heads: int, damcha: bool, hidden: int = 64) -> float:
    """Multiplications and additions of a forward pass, for one token."""
    projections, feed_forward, attention = (2 if damcha else 4) * D * D, 8 * D * D, T * D  # half of T is visible, twice
    total = layers * (projections + feed_forward + attention)
    if damcha:
        per_head = D * (D // heads)
        total += D * hidden + hidden * per_head + layers * per_head
    return 2.0 * total


for B, T, D, layers, heads, factor in (
    (32, 128, 128, 4, 4, 1.10),
    (32, 128, 128, 4, 8, 1.10),
    (4, 1024, 128, 4, 4, 1.05),
    (4, 1024, 128, 4, 8, 1.05),
    (8, 256, 256, 6, 8, 1.10),
    (4, 256, 512, 10, 8, 1.25),
):
    size = (B, T, D, layers, heads)
    title = f"training step, shared metrics, B {B}, T {T}, D {D}, {layers} layers, {heads} heads"
    limit = factor
    if D == 512:
        limit = round(factor * step_operations(*size[1:], damcha=True) / step_operations(*size[1:], damcha=False), 2)
    case(
        f"step-{B}-{T}-{D}-{heads}",
        title,
        {"zoo": training_step(*size), "standard attention": training_step(*size, **STANDARD)},
        [Aim("standard attention", at_most=limit)],
    )
    case(
        f"step-{B}-{T}-{D}-{heads}-stride",
        f"{title}, context_stride 16",
        {"zoo": training_step(*size, context_stride=16), "standard attention": training_step(*size, **STANDARD)},
    )


def chunked_training(chunk_size: int | None) -> Build:
    return training_step(1, 8192, 512, 4, 8, chunk_size=chunk_size)


case(
    "chunks",
    "training step, B 1, T 8192, D 512, 4 layers, 8 heads, chunk_size 256",
    {"zoo": chunked_training(256), "chunk_size left out": chunked_training(None)},
    rounds=2,
    memory=["chunk_size left out"],
)


def generation(cached: bool, context: int = 1024, **options: Any) -> Build:
    """One more token after ``context`` of them."""

    def build(device: str) -> Step:
        torch.manual_seed(0)
        model = LanguageModel(
            2048, 128, 4, 512, 4, max_len=context, **{"dropout": 0.0, "mlp_hidden": (64,), **options}
        ).to(device)
        model.eval()
        tokens = torch.randint(2048, (1, context), device=device)
        cache = DecoderCache(model.decoder, context + 2048)
        with torch.inference_mode():
            model(tokens[:, 1:], cache=cache)

        @torch.inference_mode()
        def step() -> None:
            hidden = model.hidden_states(tokens[:, :1], cache=cache) if cached else model.hidden_states(tokens)
            model.head(hidden[:, -1]).argmax(dim=-1)

        return step

    return build


case(
    "generation",
    "one more token after 1,024, D 128, 4 layers, shared metrics",
    {"zoo": generation(True), "no cache": generation(False), "standard attention": generation(True, **STANDARD)},
    [Aim("no cache", at_least=30), Aim("standard attention", at_least=0.8)],
    rounds=101,
)


# ---------------------------------------------------------------------- vision


def pictures(name: str, train: bool) -> Build:
    def build(device: str) -> Step:
        torch.manual_seed(0)
        model = timm.create_model(name).to(device).train(train)
        x, target = torch.randn(8, 3, 224, 224, device=device), torch.randint(1000, (8,), device=device)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        @torch.inference_mode()
        def infer() -> None:
            model(x)

        def step() -> None:
            optimizer.zero_grad()
            F.cross_entropy(model(x), target).backward()
            optimizer.step()

        return step if train else infer

    return build


for what, train, factor in (("inference", False, 1.10), ("training", True, 1.00)):
    case(
        f"vit-{what}",
        f"damcha_vit_tiny_patch16_224, {what}, batch 8",
        {
            "zoo": pictures("damcha_vit_tiny_patch16_224", train),
            "timm's vit_tiny_patch16_224": pictures("vit_tiny_patch16_224", train),
        },
        [Aim("timm's vit_tiny_patch16_224", at_least=factor)],
        rounds=15,
    )


# ---------------------------------------------------------------------- graph

WIDTH, HEADS = 64, 4  # of packed attention


def packed(make: Callable[[], Any], n: int, batch: int) -> Build:
    """Forward and backward of a self-attention layer over n nodes."""

    def build(device: str) -> Step:
        torch.manual_seed(0)
        layer = make().to(device)
        x = torch.randn(batch, n, WIDTH, device=device, requires_grad=True)
        takes_three = not isinstance(layer, (DenseMasked, Geometric))

        def step() -> None:
            y = layer(x, x, x)[0] if takes_three else layer(x)
            y.square().mean().backward()
            layer.zero_grad()
            x.grad = None

        return step

    return build


class Geometric(nn.Module):
    """PyTorch Geometric's ``TransformerConv`` with an output projection, as the others have."""

    def __init__(self, graph: tuple[Any, Any], n: int, batch: int) -> None:
        super().__init__()
        from torch_geometric.nn import TransformerConv

        self.conv = TransformerConv(WIDTH, WIDTH // HEADS, heads=HEADS, root_weight=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self._run = disjoint_union(self.conv, *graph, n, batch)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self._run(x))


def packed_layers(n: int, degree: float, batch: int) -> dict[str, Build]:
    graph = power_law_graph(n, degree)
    found = {"zoo": packed(partial(PackedMultiheadAttention, *graph, n, n, WIDTH, HEADS), n, batch)}
    if importlib.util.find_spec("kpnn2"):
        import kpnn2

        def reference(chunk: int | None) -> Any:
            source, target = map(torch.from_numpy, graph)
            return kpnn2.PackedMultiheadAttention(source, target, n, n, WIDTH, HEADS, chunk_size=chunk)

        for chunk in (None, 1024, 4096, 16384, 65536):
            if chunk is None or chunk < len(graph[0]):
                found[f"kpnn2|{chunk}"] = packed(partial(reference, chunk), n, batch)
    if importlib.util.find_spec("torch_geometric"):
        found["PyTorch Geometric"] = packed(partial(Geometric, graph, n, batch), n, batch)
    if n <= 2000:
        found["dense, fused"] = packed(partial(DenseMasked, *graph, n, WIDTH, HEADS), n, batch)
    return found


for n, degree, batch in ((500, 4, 32), (2000, 8, 16), (10_000, 8, 4)):
    found_layers = packed_layers(n, degree, batch)
    case(
        f"packed-{n}",
        f"packed attention, fwd + bwd, {n:,} nodes, {degree} edges each, batch {batch}",
        found_layers,
        [Aim("kpnn2", at_least=2.5, memory_at_most=1.0), Aim("PyTorch Geometric", at_least=2.5)],
        memory=["kpnn2|1024"] if "kpnn2|1024" in found_layers else (),
    )
for degree in (100, 200, 1000):
    graph = power_law_graph(2000, degree)
    case(
        f"packed-dense-{degree}",
        f"packed attention, fwd + bwd, 2,000 nodes, {len(graph[0]) / 2000**2:.0%} of all pairs, batch 4",
        {
            "zoo": packed(partial(PackedMultiheadAttention, *graph, 2000, 2000, WIDTH, HEADS), 2000, 4),
            "dense, fused": packed(partial(DenseMasked, *graph, 2000, WIDTH, HEADS), 2000, 4),
        },
        [Aim("dense, fused", at_least=1.0)],
    )

graph = power_law_graph(4000, 700)
case(
    "packed-dense-chunks",
    f"packed attention, fwd + bwd, 4,000 nodes, {len(graph[0]) / 4000**2:.0%} of pairs, batch 2, chunk_size 262,144",
    {
        "zoo": packed(partial(PackedMultiheadAttention, *graph, 4000, 4000, WIDTH, HEADS, chunk_size=1 << 18), 4000, 2),
        "chunk_size left out": packed(partial(PackedMultiheadAttention, *graph, 4000, 4000, WIDTH, HEADS), 4000, 2),
        "dense, fused": packed(partial(DenseMasked, *graph, 4000, WIDTH, HEADS), 4000, 2),
    },
    rounds=3,
    memory=["chunk_size left out", "dense, fused"],
)


# ---------------------------------------------------------------------- commands

TOY = """
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.cli import LightningCLI

class Toy(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.layer = torch.nn.Linear(width, 1)
    def training_step(self, batch, batch_idx):
        return self.layer(batch).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

class Data(LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()

LightningCLI(Toy, Data, args=["fit", "--help"])
"""


def command(*words: str) -> Build:
    def build(device: str) -> Step:
        return partial(subprocess.run, [sys.executable, *words], check=True, capture_output=True)

    return build


case(
    "import",
    "import zoo",
    {"zoo": command("-c", "import zoo"), "its libraries": command("-c", "import torch, lightning.pytorch, timm")},
    [Aim("its libraries", at_most=1.05)],
)
case(
    "help",
    "lightning fit --help",
    {
        "zoo": command("-c", "from zoo.cli import lightning_main; lightning_main()", "fit", "--help"),
        "LightningCLI, toy model": command("-c", TOY),
    },
    [Aim("LightningCLI, toy model", at_most=1.3)],
)


# ---------------------------------------------------------------------- Lightning


class Timer(pl.Callback):
    """Seconds from the start of step ``SKIPPED`` to the end of the last."""

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == SKIPPED:
            self.start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds = time.perf_counter() - self.start if hasattr(self, "start") else 0.0


def lightning_steps(make: Callable[[], tuple[Any, pl.LightningDataModule]], bare: bool) -> Build:
    """``STEPS`` training steps through a Trainer with its usual logger, or in a bare loop on the same batches."""

    def build(device: str) -> Step:
        pl.seed_everything(0, verbose=False)
        task, data = make()
        data.prepare_data()
        data.setup("fit")
        task.build(data.identity())
        batches = list(islice(cycle(data.train_dataloader()), SKIPPED + STEPS))
        folder = tempfile.TemporaryDirectory()

        def fit() -> float:
            timer = Timer()
            trainer = pl.Trainer(
                max_steps=len(batches), accelerator="gpu" if device == "cuda" else "cpu", devices=1,
                logger=TensorBoardLogger(folder.name), log_every_n_steps=10, callbacks=[timer],
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            )  # fmt: skip
            trainer.fit(task, train_dataloaders=DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
            return timer.seconds

        if not bare:
            return fit
        fit()
        optimizer = task.trainer.optimizers[0]
        task.to(device).train()
        task.log = task.log_dict = lambda *_, **__: None
        moved = [move_data_to_device(batch, torch.device(device)) for batch in batches[SKIPPED:]]

        def loop() -> None:
            for index, batch in enumerate(moved):
                optimizer.zero_grad()
                loss = task.training_step(batch, index)
                (loss["loss"] if isinstance(loss, Mapping) else loss).backward()
                optimizer.step()

        return loop

    return build


STILL = 1e-9  # a learning rate that leaves weights as they are: attention's time depends on what it attends to


def language_task() -> tuple[Any, pl.LightningDataModule]:
    task = LanguageModelTask(mlp_hidden=[64], dropout=0.0, lr=STILL)
    return task, TextDataModule(tokenizer="byte", window=128, batch_size=16)


def graph_task() -> tuple[Any, pl.LightningDataModule]:
    return GraphPredictionTask(readout="all", lr=STILL), GraphTableDataModule()


def vision_task() -> tuple[Any, pl.LightningDataModule]:
    return ImageClassificationTask("damcha_vit_tiny_patch4_32", lr=STILL), ImageDataModule("digits", batch_size=32)


for name, make in (("language", language_task), ("vision", vision_task), ("graph", graph_task)):
    case(
        f"lightning-{name}",
        f"a training step of the {name} task through Lightning",
        {"zoo": lightning_steps(make, bare=False), "bare loop": lightning_steps(make, bare=True)},
        [Aim("bare loop", at_most=1.05)],
        rounds=9,
    )


# ---------------------------------------------------------------------- growth


def growth(name: str) -> dict[int, Case]:
    """Sizes and what to run at each, for a curve."""
    return {size: CASES_OF_CURVES[f"{name}-{size}"] for size in SIZES[name]}


SIZES = {"tokens": (128, 256, 512, 1024, 2048, 4096), "edges": (10_000, 100_000, 1_000_000, 10_000_000)}
CASES_OF_CURVES: dict[str, Case] = {}
for T in SIZES["tokens"]:
    builds = {
        "zoo": training_step(1, T, 128, 4, 4),
        "zoo, context_stride 16": training_step(1, T, 128, 4, 4, context_stride=16),
        "zoo, chunk_size 256": training_step(1, T, 128, 4, 4, chunk_size=256),
        "standard attention": training_step(1, T, 128, 4, 4, **STANDARD),
    }
    if T <= 1024:
        builds["as written (no optimizer)"] = backward_of(partial(literal, 128, 4, 4), (1, T, 128))
    CASES_OF_CURVES[f"tokens-{T}"] = Case(f"tokens-{T}", f"T {T}", builds)


def large_graph(edges: int) -> PackedMultiheadAttention:
    n = edges // 8
    return PackedMultiheadAttention(*power_law_graph(n, 8), n, n, WIDTH, HEADS)


for edges in SIZES["edges"]:
    CASES_OF_CURVES[f"edges-{edges}"] = Case(
        f"edges-{edges}", f"{edges} edges", {"zoo": packed(partial(large_graph, edges), edges // 8, 1)}
    )
