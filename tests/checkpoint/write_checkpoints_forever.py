"""A program that writes one checkpoint after another into a folder and prints the step of each."""

import sys

import torch

from culm.checkpoint import CheckpointCatalog, Storage


def main(folder: str) -> None:
    catalog = CheckpointCatalog(Storage(folder))
    for step in range(1, 10_000):
        receipts = []
        for worker in range(3):
            tensors = {f"{worker}.weight": torch.full((1 << 18,), float(step))}
            receipts.append(catalog.write_shard(step, catalog.shard_name(step, worker), tensors))
        catalog.commit(step, receipts, {}, {}, 0.0)
        print(step, flush=True)
        catalog.prune(keep_last=2)


if __name__ == "__main__":
    main(sys.argv[1])
