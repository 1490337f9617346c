"""Every config at a small size, on small data."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from torchvision.datasets import CIFAR10

from tests.conftest import TINY_MODEL

CONFIGS = Path(__file__).parents[2] / "configs"
STUDIES = sorted(CONFIGS.glob("study/*.yaml"))
NAMES = sorted(path.relative_to(CONFIGS).as_posix() for path in set(CONFIGS.glob("*/*.yaml")) - set(STUDIES))


@pytest.fixture(scope="session")
def picture_folder(tmp_path_factory) -> Path:
    """Two classes of small pictures, 20 of each."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for i in range(20):
            pixels = random.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="session")
def cifar_folder(tmp_path_factory) -> Path:
    """CIFAR-10 in its own format on disk, with a few random pictures."""
    folder, random = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    inside = folder / CIFAR10.base_folder
    inside.mkdir()
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        batch = {"data": random.integers(0, 256, (200, 3072), dtype=np.uint8), "labels": [i % 10 for i in range(200)]}
        (inside / name).write_bytes(pickle.dumps(batch))
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (inside / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    return folder


@pytest.fixture(scope="session")
def pair_file(tmp_path_factory) -> Path:
    """A hundred pairs of texts."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = [{"source": f"say {i}", "target": f"{i} is said"} for i in range(100)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def small(tiny_arguments, picture_folder, cifar_folder, pair_file, monkeypatch) -> Callable[[str], list[str]]:
    """The arguments that make a config small; a config whose data needs a package that isn't there is skipped."""

    def arguments(config: str) -> list[str]:
        chosen: list[object] = ["--config", CONFIGS / config, "--trainer.enable_progress_bar", "false"]
        chosen += ["--trainer.enable_model_summary", "false"]
        if config.startswith("lm/"):
            chosen += _small_language(config, tiny_arguments, pair_file)
        elif config.startswith("vit/"):
            chosen += _small_pictures(config, picture_folder, cifar_folder, monkeypatch)
        elif (edges := (CONFIGS / config).with_name(f"{Path(config).stem}_edges.csv")).is_file():
            chosen += ["--data.edges", edges]
        if "pbmc" in config:
            pytest.importorskip("anndata", reason="the PBMC table needs the extra bio")
            pytest.importorskip("scanpy", reason="the PBMC table needs the extra bio")
        return list(map(str, chosen))

    return arguments


def _small_language(config, tiny_arguments, pair_file) -> list[object]:
    kind = yaml.safe_load((CONFIGS / config).read_text())["data"]["class_path"]
    if kind.endswith("TextDataModule"):
        return tiny_arguments
    model = [part for name, value in TINY_MODEL.items() for part in (f"--model.{name}", value)]
    if kind.endswith("TextPairDataModule"):
        data = ["--data.path", pair_file, "--data.vocab_size", 300, "--data.window", 32]
    else:
        data = ["--data.n_train", 60, "--data.n_val", 20, "--data.n_test", 20]
    return [*model, *data, "--data.batch_size", 4]


def _small_pictures(config, picture_folder, cifar_folder, monkeypatch) -> list[object]:
    own = yaml.safe_load((CONFIGS / config).read_text())["model"]["init_args"].get("options", {})
    options = {**own, "embed_dim": 24, "depth": 2, "num_heads": 3}
    if "cifar10" in config:
        monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)  # checksums are the real set's
        monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": None})
        data = ["--data.path", cifar_folder, "--data.download", "false", "--data.num_workers", 0]
        data += ["--data.batch_size", 16]
    elif "own_folder" in config:
        data = ["--data.path", picture_folder, "--data.batch_size", 4]
        options["img_size"] = 32
    else:
        data = ["--data.batch_size", 16]
    return [*data, "--model.options", json.dumps(options)]
