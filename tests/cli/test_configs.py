"""Every config in configs/ runs, on small data and at a small size."""

from pathlib import Path

import pytest
import yaml

CONFIGS = Path(__file__).parents[2] / "configs"
LANGUAGE = sorted(path.relative_to(CONFIGS).as_posix() for path in (CONFIGS / "lm").glob("*.yaml"))


GRAPH = sorted(path.relative_to(CONFIGS).as_posix() for path in (CONFIGS / "graph").glob("*.yaml"))


def test_every_family_of_configs_is_run_by_a_test():
    assert {path.name for path in CONFIGS.iterdir()} == {"lm", "graph"}
    assert LANGUAGE
    assert GRAPH


@pytest.mark.parametrize("config", GRAPH)
def test_graph_config_fits_two_steps_validates_and_leaves_its_run(config, lightning, tmp_path):
    edges = ()
    if "pbmc" in config:
        edges = ("--data.edges", CONFIGS / "graph" / "pbmc_edges.csv")
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


def test_paper_config_has_the_size_of_the_paper():
    model = yaml.safe_load((CONFIGS / "lm" / "stdlib_damcha_paper.yaml").read_text())["model"]["init_args"]
    assert (model["d_model"], model["n_heads"], model["n_layers"]) == (512, 8, 10)
    assert len(model["mlp_hidden"]) + 1 == 9
    assert model["lr"] == 3e-4
