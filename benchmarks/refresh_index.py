"""Bring checkpoints/index.json up to date with the files it speaks of.

    python benchmarks/refresh_index.py                # SHA-256, sizes, parameters, identities
    python benchmarks/refresh_index.py --measure      # and the test figures, as `lightning test --ckpt_path` gives them

What a person has to say of a model (summary, command, training time, versions, which figures count) is written into the
index by hand; a new model needs "sha256", "identity": 64 zeros, and "bytes", "parameters": 1, to be filled in here.
"""

import argparse
import hashlib
import json
from dataclasses import replace

from zoo.catalogue import load_pretrained, measure
from zoo.checkpoint import Checkpoint, read_index
from zoo.checkpoint.index import shelf_folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--only", nargs="+", metavar="NAME")
    chosen = parser.parse_args()
    entries = []
    for entry in read_index().values():
        if chosen.only and entry.name not in chosen.only:
            entries.append(entry)
            continue
        content = entry.path.read_bytes()
        checkpoint = Checkpoint.open(entry.path)
        task = load_pretrained(checkpoint)
        metrics = entry.metrics
        if chosen.measure:
            found = measure(entry)
            metrics = tuple(
                {**metric, "value": round(found[f"test/{metric['name']}"], 5)} if metric["split"] == "test" else metric
                for metric in metrics
            )
        entry = replace(
            entry,
            sha256=hashlib.sha256(content).hexdigest(),
            bytes=len(content),
            parameters=sum(p.numel() for p in task.parameters()),
            identity=checkpoint.digest,
            metrics=metrics,
        )
        entries.append(entry)
        print(f"{entry.name}: {entry.bytes:,} bytes, {entry.parameters:,} parameters, {[*entry.metrics]}")
    file = shelf_folder() / "index.json"
    found = json.loads(file.read_text(encoding="utf-8")) | {"models": [entry.to_dict() for entry in entries]}
    text = json.dumps(found, indent=2, ensure_ascii=False)
    file.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
