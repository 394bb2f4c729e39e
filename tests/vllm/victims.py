"""The same operations in every process: prints who was stored and who left, for a run under another hash seed."""

from __future__ import annotations

import random

from tests.vllm.manager_kit import HIT, Kit, keys_of


def main() -> None:
    kit, rng = Kit(24, n_groups=2, sliding=frozenset({1})), random.Random(11)
    told: list[str] = []
    for i in range(400):
        name, n = f"p{rng.randrange(14)}", rng.randrange(1, 9)
        keys = keys_of(name, n) + keys_of(name, n, 1)
        context = kit.request(keys[:n], keys[n:])
        hits = kit.lookup(keys[:n], context).count(HIT)
        if hits and rng.random() < 0.5:
            kit.load(keys[:hits], context)  # completed as a set, as vLLM does
        kit.step()
        kit.store(keys, context)
        kit.manager.on_request_finished(context)
        if i == 200:
            kit.manager.reset_cache()
        for event in kit.manager.take_events():
            told += [f"{'-' if event.removed else '+'}{key.hex()[:16]}" for key in event.keys]
    slots = [f"{entry.chunk.key.hex()[:16]}@{entry.slot}" for entry in kit.hierarchy.primary]
    kit.close()
    print(" ".join(told + slots))


if __name__ == "__main__":
    main()
