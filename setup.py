"""Puts the index, cards and configs into a built package, where it finds them without a clone; no weights."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

CARRIED = ("checkpoints/index.json", "checkpoints/*/card.md", "checkpoints/*/config.yaml", "configs/*/*.*")


class BuildWithData(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # has the folders themselves beside it
            return
        shutil.rmtree(Path(self.build_lib, "zoo", "_data"), ignore_errors=True)
        for file in (file for pattern in CARRIED for file in Path().glob(pattern)):
            target = Path(self.build_lib, "zoo", "_data", file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


setup(cmdclass={"build_py": BuildWithData})
