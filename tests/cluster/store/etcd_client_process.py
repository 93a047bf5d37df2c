"""A store client as a process, for tests that give it its own network: `etcd_client_process URL NAME`.

It joins as nodes/NAME, prints each change of nodes/ and the end of its session, and reads commands from its input:
`get KEY` and `put KEY VALUE`. All output is in lines.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

from culm.cluster.store.etcd import EtcdAccess, EtcdStore
from culm.cluster.timeouts import derive_timeouts
from culm.errors import RunError


async def main(url: str, name: str) -> None:
    async with await EtcdStore.open(
        EtcdAccess(endpoints=(url,)), "lab", timeouts=derive_timeouts(0.5), timeout_s=20
    ) as store:
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
    await store.wait_until_fenced()
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
