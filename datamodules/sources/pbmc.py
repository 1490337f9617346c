"""Blood cells that come with another package."""

import importlib.util
from pathlib import Path

from datamodules.sources.base import TableData, TableSource, register_table
from zoo.errors import ZooError


@register_table("pbmc68k_reduced")
class Pbmc(TableSource):
    """The 700 blood cells that the scanpy package carries; needs that package, a graph and a label.

    Scanpy isn't imported, which takes seconds.

    Source: 10x Genomics, Fresh 68k PBMCs (Donor A), CC BY 4.0, a part of it as scanpy carries it.
    """

    def load(self) -> TableData:
        found = importlib.util.find_spec("scanpy")
        if found is None or not found.submodule_search_locations:
            raise ZooError(
                f"{self.argument}: got {self.name}, which comes with the scanpy package, and that isn't installed; "
                "pip install 'damcha-zoo[bio]'"
            )
        path = Path(found.submodule_search_locations[0], "datasets", f"10x_{self.name}.h5ad")
        if not path.is_file():
            raise ZooError(f"{self.argument}: this version of scanpy has no {path}; pip install 'damcha-zoo[bio]'")
        return TableData(path)
