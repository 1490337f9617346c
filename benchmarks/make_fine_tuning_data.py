"""The data of docs/fine-tuning.md: pictures of printed digits, and a table whose graph has other nodes.

    python benchmarks/make_fine_tuning_data.py FOLDER

FOLDER/printed: train, val and test with a folder a digit, of fonts that matplotlib carries, turned by up to 12 degrees:
a picture a font in train and val, four in test; no font is in two splits. FOLDER/cells.csv and cells_edges.csv:
scikit-learn's breast cancer table and the graph of its names, with one measurement and one feature under other names,
and one measurement more.
"""

import argparse
from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from datamodules.sources.breast_cancer import breast_cancer_edges, breast_cancer_table

SPLITS = {"train": 10, "val": 4}  # fonts; the others are for the test
SIZE = 32


def fonts_with_digits() -> list[Path]:
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    plain = ("DejaVuSans", "DejaVuSerif", "STIXGeneral", "cmr10", "cmb10", "cmss10", "cmtt10")
    return sorted(file for file in folder.glob("*.ttf") if file.stem.startswith(plain) and "Display" not in file.stem)


def picture(font: Path, digit: str, degrees: float) -> Image.Image:
    """A digit in white on black, in the middle."""
    canvas = Image.new("L", (SIZE, SIZE), 0)
    letters = ImageFont.truetype(str(font), 36)
    left, top, right, bottom = letters.getbbox(digit)
    place = (SIZE - right - left) / 2, (SIZE - bottom - top) / 2
    ImageDraw.Draw(canvas).text(place, digit, fill=255, font=letters)
    return canvas.rotate(degrees, resample=Image.Resampling.BICUBIC)


def write_pictures(folder: Path) -> None:
    random = np.random.default_rng(0)
    fonts = fonts_with_digits()
    random.shuffle(fonts)
    splits = [name for name, n in SPLITS.items() for _ in range(n)]
    splits += ["test"] * (len(fonts) - len(splits))
    for font, split in zip(fonts, splits, strict=True):
        for digit in "0123456789":
            place = folder / split / digit
            place.mkdir(parents=True, exist_ok=True)
            for i in range(4 if split == "test" else 1):
                picture(font, digit, random.uniform(-12, 12)).save(place / f"{font.stem}_{i}.png")
    print(f"{folder}: fonts: {', '.join(f'{splits.count(name)} {name}' for name in dict.fromkeys(splits))}")


def write_table(folder: Path) -> None:
    table, edges = breast_cancer_table(), breast_cancer_edges()
    names = {"mean radius": "radius (mm)", "texture": "grain"}
    table["mean roundness"] = 4 * np.pi * table["mean area"] / table["mean perimeter"] ** 2
    edges = edges.replace(names)
    edges.loc[len(edges)] = ["mean roundness", edges.loc[edges["source"] == "mean smoothness", "target"].iloc[0]]
    table.rename(columns=names).to_csv(folder / "cells.csv", index=False)
    edges.to_csv(folder / "cells_edges.csv", index=False)
    print(f"{folder / 'cells.csv'}: {len(table)} rows; {folder / 'cells_edges.csv'}: {len(edges)} edges")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    write_pictures(folder / "printed")
    write_table(folder)


if __name__ == "__main__":
    main()
