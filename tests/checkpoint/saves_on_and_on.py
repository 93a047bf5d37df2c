"""A program that writes one checkpoint after the other into a folder and says the step of each."""

import sys

import torch

from culm.checkpoint import Catalog, Storage


def main(folder: str) -> None:
    catalog = Catalog(Storage(folder))
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
