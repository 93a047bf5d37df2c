"""A program that takes memory, gives it up and takes it again; prints how many MB came from the kernel that time."""

import mmap
import resource
import sys

from culm.providers import allocator


def faults() -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytearray(1 << 20) for _ in range(64)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def main(how: str) -> None:
    if how == "keep":
        allocator.keep_freed_memory()
    faults()
    print(faults() * mmap.PAGESIZE >> 20)


if __name__ == "__main__":
    main(sys.argv[1])
