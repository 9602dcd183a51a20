"""The repayment plan of a loan, to the cent, and a few exact fractions."""

import sys
from decimal import ROUND_HALF_EVEN, Decimal, getcontext
from fractions import Fraction

getcontext().prec = 28
principal, percent, years = Decimal(sys.argv[1]), Decimal(sys.argv[2]), int(sys.argv[3])
cent = Decimal("0.01")
rate = percent / 100 / 12
months = years * 12
payment = (principal * rate / (1 - (1 + rate) ** -months)).quantize(cent, ROUND_HALF_EVEN)
balance, paid_interest = principal, Decimal(0)
for month in range(1, months + 1):
    interest = (balance * rate).quantize(cent, ROUND_HALF_EVEN)
    due = min(payment, balance + interest) if month < months else balance + interest
    balance += interest - due
    paid_interest += interest
    if month % 12 == 0:
        print(f"year {month // 12:2}: payment {due:>10,} interest so far {paid_interest:>12,} balance {balance:>14,}")
ratio = Fraction(str(paid_interest)) / Fraction(str(principal))
print(f"interest is {ratio.limit_denominator(100)} of the loan, about {float(ratio):.4f}")
