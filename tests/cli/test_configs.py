"""Every config in configs/ runs, on small data and at a small size."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from torchvision.datasets import CIFAR10

CONFIGS = Path(__file__).parents[2] / "configs"
LANGUAGE = sorted(path.relative_to(CONFIGS).as_posix() for path in (CONFIGS / "lm").glob("*.yaml"))

GRAPH = sorted(path.relative_to(CONFIGS).as_posix() for path in (CONFIGS / "graph").glob("*.yaml"))
VISION = sorted(path.relative_to(CONFIGS).as_posix() for path in (CONFIGS / "vit").glob("*.yaml"))


def test_every_family_of_configs_is_run_by_a_test():
    assert {path.name for path in CONFIGS.iterdir()} == {"lm", "graph", "vit"}
    assert LANGUAGE
    assert GRAPH
    assert VISION


@pytest.fixture(scope="module")
def picture_folder(tmp_path_factory) -> Path:
    """Two classes of small pictures, 8 of each."""
    folder, random = tmp_path_factory.mktemp("pictures"), np.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        for i in range(8):
            pixels = random.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def cifar_folder(tmp_path_factory) -> Path:
    """CIFAR-10 in its own format on disk, with a few random pictures."""
    folder, random = tmp_path_factory.mktemp("cifar"), np.random.default_rng(0)
    inside = folder / CIFAR10.base_folder
    inside.mkdir()
    for name, _ in [*CIFAR10.train_list, *CIFAR10.test_list]:
        batch = {"data": random.integers(0, 256, (100, 3072), dtype=np.uint8), "labels": [i % 10 for i in range(100)]}
        (inside / name).write_bytes(pickle.dumps(batch))
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    (inside / "batches.meta").write_bytes(pickle.dumps({"label_names": names}))
    return folder


@pytest.mark.parametrize("config", VISION)
def test_vision_config_fits_two_steps_validates_and_leaves_its_run(
    config, lightning, picture_folder, cifar_folder, tmp_path, monkeypatch
):
    data: tuple[object, ...] = ()
    if "cifar10" in config:
        monkeypatch.setattr(CIFAR10, "_check_integrity", lambda self: True)  # checksums are the real set's
        monkeypatch.setattr(CIFAR10, "meta", CIFAR10.meta | {"md5": None})
        data = ("--data.path", cifar_folder, "--data.download", "false", "--data.num_workers", 0)
        data += ("--model.options", '{"embed_dim": 24, "depth": 2, "num_heads": 3}')
    elif "own_folder" in config:
        data = ("--data.path", picture_folder, "--data.batch_size", 4)
        data += ("--model.options", '{"img_size": 32, "embed_dim": 24, "depth": 2, "num_heads": 3}')
    lightning(
        *("fit", "--config", CONFIGS / config, *data, "--trainer.max_steps", 2, "--trainer.val_check_interval", 2),
        *("--trainer.check_val_every_n_epoch", "null", "--trainer.limit_val_batches", 1),
        *("--trainer.enable_progress_bar", "false"),
    )
    run = tmp_path / "runs" / "vit" / Path(config).stem / "version_0"
    assert (run / "checkpoints" / "best.ckpt").is_file()
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "config.yaml").is_file()
    assert list(run.glob("events.out.tfevents*"))


@pytest.mark.parametrize("config", GRAPH)
def test_graph_config_fits_two_steps_validates_and_leaves_its_run(config, lightning, tmp_path):
    own = CONFIGS / f"{Path(config).with_suffix('')}_edges.csv"
    edges = ("--data.edges", own) if own.is_file() else ()
    if "pbmc" in config:
        pytest.importorskip("anndata", reason="the PBMC table needs the extra bio")
        pytest.importorskip("scanpy", reason="the PBMC table needs the extra bio")
    lightning(
        *("fit", "--config", CONFIGS / config, *edges, "--trainer.max_steps", 2, "--trainer.val_check_interval", 2),
        *("--trainer.check_val_every_n_epoch", "null", "--trainer.enable_progress_bar", "false"),
    )
    run = tmp_path / "runs" / "graph" / Path(config).stem / "version_0"
    assert (run / "checkpoints" / "best.ckpt").is_file()
    assert (run / "config.yaml").is_file()
    assert list(run.glob("events.out.tfevents*"))


@pytest.mark.parametrize("config", LANGUAGE)
def test_config_fits_two_steps_validates_and_leaves_its_run(config, lightning, tiny_arguments, tmp_path):
    lightning(
        *("fit", "--config", CONFIGS / config, *tiny_arguments),
        *("--trainer.max_steps", 2, "--trainer.val_check_interval", 2, "--trainer.limit_val_batches", 2),
    )
    name = Path(config).stem
    run = tmp_path / "runs" / "lm" / name / "version_0"
    assert (run / "checkpoints" / "best.ckpt").is_file()
    assert (run / "checkpoints" / "last.ckpt").is_file()
    assert (run / "config.yaml").is_file()
    assert list(run.glob("events.out.tfevents*"))


def test_configs_to_compare_differ_in_their_attention_only():
    def rest(name):
        config = yaml.safe_load((CONFIGS / "lm" / f"{name}.yaml").read_text())
        for key in ("use_M", "use_mlp", "share_mlp", "mlp_hidden"):
            config["model"]["init_args"].pop(key, None)
        config["trainer"]["logger"]["init_args"].pop("name")
        return config

    shared = rest("stdlib_damcha")
    for name in ("stdlib_damcha_independent", "stdlib_static", "stdlib_standard"):
        assert rest(name) == shared


def test_vision_configs_to_compare_differ_in_their_attention_only():
    def rest(name):
        config = yaml.safe_load((CONFIGS / "vit" / f"{name}.yaml").read_text())
        for key in ("use_M", "use_mlp", "share_mlp", "mlp_hidden"):
            config["model"]["init_args"]["options"].pop(key, None)
        config["trainer"]["logger"]["init_args"].pop("name")
        return config

    for name in ("digits_damcha_independent", "digits_static", "digits_standard"):
        assert rest(name) == rest("digits_damcha")


def test_paper_config_has_the_size_of_the_paper():
    model = yaml.safe_load((CONFIGS / "lm" / "stdlib_damcha_paper.yaml").read_text())["model"]["init_args"]
    assert (model["d_model"], model["n_heads"], model["n_layers"]) == (512, 8, 10)
    assert len(model["mlp_hidden"]) + 1 == 9
    assert model["lr"] == 3e-4
