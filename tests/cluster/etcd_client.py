"""A client of the store as a process, for tests that give it a network of its own: tests.cluster.etcd_client URL NAME.

It joins as nodes/NAME, tells each change of nodes/ and the end of its session, and does what it reads from its input:
`get KEY` and `put KEY VALUE`. Everything it has to say is a line.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

from culm.cluster.etcd import Access, EtcdStore
from culm.cluster.timeouts import derive
from culm.errors import RunError


async def main(url: str, name: str) -> None:
    async with await EtcdStore.open(Access(endpoints=(url,)), "lab", timeouts=derive(0.5), patience_s=20) as store:
        await store.put(f"nodes/{name}", b"here", session=True)
        print("up", flush=True)
        await asyncio.gather(_tell(store), _end(store), _obey(store))


async def _tell(store: EtcdStore) -> None:
    try:
        async with aclosing(store.watch("nodes/")) as changes:
            async for key, value in changes:
                print(key, "gone" if value is None else "there", flush=True)
    except RunError:
        print("the watch ended", flush=True)


async def _end(store: EtcdStore) -> None:
    await store.lost()
    print("lost", flush=True)


async def _obey(store: EtcdStore) -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        verb, key, *value = line.split()
        try:
            if verb == "put":
                await store.put(key, value[0].encode())
            print(key, "is", (await store.get(key) or b"").decode(), flush=True)
        except RunError:
            print("refused", flush=True)
    sys.exit(0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
