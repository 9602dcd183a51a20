"""A calculator: one expression per line of standard input, with variables. Exits with 3 if any was wrong."""

import math
import operator
import re
import sys

TOKEN = re.compile(r"\s*(?:(\d+\.?\d*(?:e[+-]?\d+)?)|([a-z]\w*)|(.))", re.IGNORECASE)
BINARY = {
    "+": (1, operator.add), "-": (1, operator.sub), "*": (2, operator.mul), "/": (2, operator.truediv),
    "%": (2, operator.mod), "^": (4, operator.pow),
}


class Parser:
    def __init__(self, text, names):
        self.tokens = [match.groups() for match in TOKEN.finditer(text.strip())]
        self.names = names

    def peek(self):
        return self.tokens[0] if self.tokens else (None, None, None)

    def take(self, symbol):
        if self.peek()[2] != symbol:
            raise SyntaxError(f"expected {symbol!r}, found {next(filter(None, self.peek()), 'the end')!r}")
        self.tokens.pop(0)

    def expression(self, least=0):
        value = self.operand()
        while self.peek()[2] in BINARY and BINARY[self.peek()[2]][0] > least:
            precedence, function = BINARY[self.tokens.pop(0)[2]]
            value = function(value, self.expression(precedence - (function is operator.pow)))
        return value

    def operand(self):
        number, name, symbol = self.peek()
        if symbol == "-":
            self.take("-")
            return -self.expression(3)
        if symbol == "(":
            self.take("(")
            value = self.expression()
            self.take(")")
            return value
        if number is None and name is None:
            raise SyntaxError(f"unexpected {symbol or 'end'!r}")
        self.tokens.pop(0)
        if number is not None:
            return float(number)
        if self.peek()[2] == "(":
            return getattr(math, name)(self.operand())
        return self.names[name]


names, failures = {"pi": math.pi, "e": math.e}, 0
for line in sys.stdin:
    target, _, text = line.rpartition("=")
    try:
        parser = Parser(text, names)
        value = parser.expression()
        if parser.tokens:
            raise SyntaxError(f"what is {''.join(filter(None, parser.peek()))!r}?")
        names[target.strip() or "_"] = value
        print(f"{value:.10g}")
    except (SyntaxError, KeyError, ArithmeticError, AttributeError, ValueError) as error:
        failures += 1
        print(f"{line.strip()}: {type(error).__name__}: {error}", file=sys.stderr)
sys.exit(3 if failures else 0)
