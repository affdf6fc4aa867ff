from isochunk.simulator.kv import Holding, KVCache


def hold(cache, hashes, tokens, unit=16):
    holding = Holding(cache.content(hashes, unit, tokens))
    found = cache.look_up(holding.content, (tokens - 1) // cache.block)
    assert cache.needed(holding, tokens, found) <= cache.free
    cache.grow(holding, tokens, found)
    cache.keep(holding, tokens)
    return holding, sum(high - low for _, low, high in found)


def held(cache, hashes, tokens, unit=16):
    return sum(high - low for _, low, high in cache.look_up(cache.content(hashes, unit, tokens), 1000))


def test_continuations_go_before_their_beginnings():
    cache = KVCache(16, 6)
    cache.release(hold(cache, [1, 2, 3, 4], 64)[0])
    hold(cache, [9] * 4, 64)
    assert held(cache, [1, 2, 3, 4], 64) == 2


def test_a_look_up_that_serves_nobody_changes_nothing():
    cache = KVCache(16, 4)
    cache.release(hold(cache, [1, 2], 32)[0])
    cache.release(hold(cache, [3, 4], 32)[0])
    assert held(cache, [1, 2], 32) == 2
    hold(cache, [7, 8], 32)
    assert held(cache, [1, 2], 32) == 0
    assert held(cache, [3, 4], 32) == 2


def test_blocks_in_use_are_neither_free_nor_evicted():
    cache = KVCache(16, 4)
    first, _ = hold(cache, [1, 2], 33)
    assert cache.free == 1
    second, found = hold(cache, [1, 2], 33)
    assert (found, cache.free) == (2, 0)
    cache.release(first)
    assert cache.free == 1
    cache.release(second)
    assert cache.free == 4


def test_blocks_that_hold_nothing_to_be_found_go_first():
    cache = KVCache(16, 4)
    cache.release(hold(cache, [1, 2, 3], 40)[0])  # the third is not full
    hold(cache, [9], 20)
    assert held(cache, [1, 2], 48) == 2


def test_of_two_copies_the_older_is_found_and_either_outlives_the_other():
    cache = KVCache(16, 4)
    holdings = [Holding(cache.content([1, 2], 16, 32)) for _ in range(2)]
    for holding in holdings:
        cache.grow(holding, 32)
        cache.keep(holding, 32)
    cache.release(holdings[0])
    hold(cache, [5, 6], 32)
    assert held(cache, [1, 2], 32) == 2
    assert cache.free == 0


def test_half_a_unit_is_found_by_a_longer_prompt_that_begins_alike():
    cache = KVCache(16)
    hold(cache, [1], 40, unit=64)
    assert held(cache, [1], 64, unit=64) == 2


def test_units_need_not_be_whole_blocks():
    cache = KVCache(48)
    hold(cache, [1, 2, 3], 300, unit=100)
    assert held(cache, [1, 2, 4], 300, unit=100) == 200 // 48
    assert held(cache, [1, 4], 200, unit=100) == 100 // 48
