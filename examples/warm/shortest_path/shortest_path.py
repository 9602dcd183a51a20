"""Find the shortest way between two towns of a road map."""

import heapq
import sys
from collections import defaultdict


def read_roads(path):
    roads = defaultdict(dict)
    with open(path) as file:
        for line in file:
            start, end, length = line.rsplit(maxsplit=2)
            roads[start][end] = roads[end][start] = int(length)
    return roads


def shortest(roads, start, goal):
    queue, done = [(0, start, None)], {}
    while queue:
        distance, town, before = heapq.heappop(queue)
        if town in done:
            continue
        done[town] = before
        if town == goal:
            way = []
            while town is not None:
                way.append(town)
                town = done[town]
            return distance, way[::-1]
        for neighbour, length in roads[town].items():
            if neighbour not in done:
                heapq.heappush(queue, (distance + length, neighbour, town))
    raise SystemExit(f"there is no way from {start} to {goal}")


roads = read_roads(sys.argv[1])
for goal in sys.argv[3:]:
    distance, way = shortest(roads, sys.argv[2], goal)
    print(f"{distance:5} km: {' - '.join(way)}")
