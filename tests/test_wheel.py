"""What an installed package knows without a clone: the index, the cards and the configs, but no weights."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = [
    ["list"],
    ["show", "digits_damcha"],
    ["config"],
    ["config", "vit/digits_damcha"],
    ["config", "pbmc"],
    ["verify", "digits_damcha"],
    ["generate", "--ckpt", "stdlib_damcha"],
]
RUN = """
import contextlib, io, json, os, sys
import zoo
early = {"zoo.checkpoint.index", "zoo.checkpoint.remote", "jsonschema", "pandas", "lightning"} & set(sys.modules)
found = {"file": zoo.__file__, "version": zoo.__version__, "early": sorted(early)}
from zoo.cli import zoo_main
for args in json.load(sys.stdin):
    out, err, code = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            zoo_main(args)
        except SystemExit as ended:
            code = ended.code
    found[" ".join(args)] = [code, out.getvalue(), err.getvalue()]
os.environ["ZOO_ORIGIN"] = sys.argv[1]
zoo_main(["verify", "digits_damcha"])
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    # Versions, not find_spec("pip"): looking for pip makes setuptools give up its distutils for this whole process.
    try:
        ready = bool(version("pip")) and int(version("setuptools").split(".")[0]) >= 77
    except PackageNotFoundError:
        ready = False
    if not ready:
        pytest.skip("building needs pip and setuptools 77 here, as there is no network")
    source = tmp_path_factory.mktemp("source")
    for folder in ("zoo", "datamodules", "configs", "checkpoints"):
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__", "*.ckpt"))
    (source / "checkpoints" / "digits_damcha" / "model.ckpt").write_bytes(b"weights")
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    done = subprocess.run([*build, "--wheel-dir", source / "dist", source], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = (source / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def ran(wheel, tmp_path_factory):
    """Each command's exit code, output and errors, run from the installed files alone."""
    site, elsewhere = tmp_path_factory.mktemp("site"), tmp_path_factory.mktemp("elsewhere")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    hidden = {"ZOO_SHELF", "ZOO_ORIGIN"}
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {"PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", RUN, (ROOT / "checkpoints").as_uri()],
        input=json.dumps(COMMANDS),
        capture_output=True,
        text=True,
        cwd=elsewhere,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    verified, printed = done.stdout.splitlines()
    found = json.loads(printed)
    found["with ZOO_ORIGIN"] = verified
    assert Path(found.pop("file")).is_relative_to(site)
    return found


def test_wheel_has_index_cards_and_configs_and_no_weights(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for pattern in ("checkpoints/index.json", "checkpoints/*/card.md", "checkpoints/*/config.yaml", "configs/*/*.*"):
        assert {f"zoo/_data/{path.relative_to(ROOT).as_posix()}" for path in ROOT.glob(pattern)} <= names
    assert not any(name.endswith(".ckpt") for name in names)
    assert {"zoo/py.typed", "datamodules/py.typed"} <= names
    tops = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert tops == {"zoo", "datamodules"}


def test_importing_the_zoo_looks_at_no_shelf_and_waits_for_no_trainer(ran):
    assert ran["early"] == []


def test_version_is_that_of_the_project(ran):
    assert ran["version"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def test_installed_commands_know_the_index_and_the_configs(ran):
    for command in COMMANDS[:5]:
        code, out, _ = ran[" ".join(command)]
        assert (code, bool(out)) == (0, True), command
    assert "stdlib_damcha " in ran["list"][1]
    assert "File: not here: ZOO_SHELF or ZOO_ORIGIN says where" in ran["show digits_damcha"][1]
    assert ran["config vit/digits_damcha"][1] == (ROOT / "configs" / "vit" / "digits_damcha.yaml").read_text()
    edges = next(line for line in ran["config pbmc"][1].splitlines() if "edges:" in line).partition(": ")[2]
    assert Path(edges).read_text() == (ROOT / "configs" / "graph" / "pbmc_edges.csv").read_text()


def test_installed_commands_fetch_weights_from_an_origin(ran):
    assert ran["with ZOO_ORIGIN"].startswith("digits_damcha: SHA-256 ")


def test_an_editable_install_uses_the_folders_of_the_clone(wheel, tmp_path):
    source = wheel.parents[1]
    code = f"from setuptools.build_meta import build_editable as b; b({str(tmp_path)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)
    assert not (source / "zoo" / "_data").exists()
    names = zipfile.ZipFile(next(tmp_path.glob("*.whl"))).namelist()
    assert not any("_data" in name for name in names)


@pytest.mark.parametrize("command", COMMANDS[5:])
def test_installed_commands_say_where_weights_come_from(command, ran):
    code, out, err = ran[" ".join(command)]
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "its weights aren't here" in err
    assert "set ZOO_SHELF to the checkpoints folder of a clone of the repository, or ZOO_ORIGIN" in err
