"""The two console scripts: parsing and printing, nothing else."""

from zoo.cli.zoo import lightning_main, zoo_main

__all__ = ["lightning_main", "zoo_main"]
