"""An asyncio pipeline: one reader, three workers, one ordered result."""

import asyncio
import sys


async def produce(lines, queue, workers):
    for number, line in enumerate(lines):
        await queue.put((number, line.strip()))
    for _ in range(workers):
        await queue.put(None)


async def work(queue, results):
    while (job := await queue.get()) is not None:
        number, line = job
        await asyncio.sleep(0.001 * (number % 3))
        results[number] = f"{line[::-1]} ({len(line)})"


async def main():
    queue, results = asyncio.Queue(2), {}
    await asyncio.gather(produce(sys.stdin, queue, 3), *(work(queue, results) for _ in range(3)))
    for number in sorted(results):
        print(number, results[number])


asyncio.run(main())
