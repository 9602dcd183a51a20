"""Count primes in several threads, in order."""

import threading
from concurrent.futures import ThreadPoolExecutor


def primes_below(limit):
    sieve = bytearray([1]) * limit
    sieve[:2] = b"\0\0"
    for number in range(2, int(limit**0.5) + 1):
        if sieve[number]:
            sieve[number * number :: number] = bytes(len(range(number * number, limit, number)))
    return sum(sieve)


lock, seen = threading.Lock(), set()


def task(limit):
    with lock:
        seen.add(threading.get_ident())
    return limit, primes_below(limit)


with ThreadPoolExecutor(4) as pool:
    for limit, count in pool.map(task, [10**power for power in range(1, 6)]):
        print(f"{count:6} primes below {limit}")
print(threading.active_count(), "thread is left")
