"""What the configs are to have in common; test_going_on.py runs every one of them."""

import pytest
import yaml

from tests.cli.conftest import CONFIGS, NAMES, STUDIES
from zoo.study import read_study


def test_every_family_has_configs():
    assert {name.partition("/")[0] for name in NAMES} == {"lm", "graph", "vit"}


def test_configs_to_compare_differ_in_their_attention_only():
    def rest(name):
        config = yaml.safe_load((CONFIGS / "lm" / f"{name}.yaml").read_text())
        for key in ("attention", "share_mlp", "mlp_hidden"):
            config["model"]["init_args"].pop(key, None)
        config["trainer"]["logger"]["init_args"].pop("name")
        return config

    shared = rest("stdlib_damcha")
    for name in ("stdlib_damcha_independent", "stdlib_static", "stdlib_standard"):
        assert rest(name) == shared


def test_vision_configs_to_compare_differ_in_their_attention_only():
    def rest(name):
        config = yaml.safe_load((CONFIGS / "vit" / f"{name}.yaml").read_text())
        config["model"]["init_args"].pop("attention", None)
        config["model"]["init_args"]["options"].pop("share_mlp", None)
        config["trainer"]["logger"]["init_args"].pop("name")
        return config

    for name in ("digits_damcha_independent", "digits_static", "digits_standard"):
        assert rest(name) == rest("digits_damcha")


def test_paper_config_has_the_size_of_the_paper():
    model = yaml.safe_load((CONFIGS / "lm" / "stdlib_damcha_paper.yaml").read_text())["model"]["init_args"]
    assert (model["d_model"], model["n_heads"], model["n_layers"]) == (512, 8, 10)
    assert len(model["mlp_hidden"]) + 1 == 9
    assert model["lr"] == 3e-4


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.stem)
def test_studies_that_ship_keep_to_the_protocol(path, monkeypatch):
    monkeypatch.chdir(CONFIGS.parent)
    study = read_study(path)
    assert not [said for said in study.protocol.deviations() if "nothing was compared" not in said]
    assert path.read_text().splitlines()[1].startswith(f"#   zoo study configs/study/{path.name}")
