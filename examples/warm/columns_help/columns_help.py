"""The way a command line tool refuses bad arguments: usage on standard error, status 2."""

import argparse

parser = argparse.ArgumentParser(prog="columns_help")
parser.add_argument("count", type=int)
parser.add_argument("--mode", choices=["fast", "slow"])
print(parser.parse_args())
