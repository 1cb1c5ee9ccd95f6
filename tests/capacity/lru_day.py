"""A day of two plain LRU caches, without an engine around them."""

import math
import random
from collections import OrderedDict

from kvheadroom.capacity.reuse import Stretch

POOL_TOKENS = 60_000


def lru_day(rng: random.Random, tier_tokens: int) -> tuple[list[Stretch], float]:
    """Two LRU caches of sessions under a load that comes and goes; (a day's stretches, what was found of all).

    A session asks for its 1,000 tokens about ten times, minutes apart.
    """
    caches = (OrderedDict[int, None](), POOL_TOKENS), (OrderedDict[int, None](), tier_tokens)
    due: list[tuple[float, int]] = []
    at = 0.0
    for session in range(20_000):
        at += rng.expovariate(0.03 * (1.0 + 0.9 * math.sin(at / 10_000.0)))
        when = at
        while True:
            due.append((when, session))
            when += math.exp(rng.gauss(math.log(300.0), 1.0))
            if rng.random() < 0.1:
                break
    figures = [[0.0, 0.0, 0.0] for _ in range(144)]
    for when, session in sorted(due):
        if when >= 86_400.0:
            break
        one = figures[int(when // 600)]
        one[0] += 1000.0
        found = [session in cache for cache, _ in caches]
        if any(found):
            one[1 if found[0] else 2] += 1000.0
        for cache, size in caches:
            cache.pop(session, None)
            cache[session] = None
            if len(cache) * 1000 > size:
                cache.popitem(last=False)
    stretches = [
        Stretch(600.0, one[0], one[1], one[2], 0.0, 0.0, 0.0, follows=place > 0)
        for place, one in enumerate(figures)
    ]
    return stretches, sum(one[1] + one[2] for one in figures) / sum(one[0] for one in figures)
