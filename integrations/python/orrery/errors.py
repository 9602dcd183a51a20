"""Errors name the operation, the value, the cause and a way out."""

from __future__ import annotations

from typing import Optional


class Error(Exception):
    """An operation of Orrery failed.

    The text is `cannot OPERATION VALUE: CAUSE; WAY OUT`. `errno` is the C library's, where it has one.
    """

    def __init__(self, operation: str, value: str, cause: str, way_out: str, errno: Optional[int] = None) -> None:
        self.operation = operation
        self.value = value
        self.cause = cause
        self.way_out = way_out
        self.errno = errno
        what = f"{operation} {value}" if value else operation
        # The C library's texts say all of it themselves.
        text = cause if cause.startswith("cannot ") else f"cannot {what}: {cause}"
        super().__init__(f"{text}; {way_out}" if way_out and way_out not in text else text)

    def __reduce__(self) -> tuple[type[Error], tuple[str, str, str, str, Optional[int]]]:
        return type(self), (self.operation, self.value, self.cause, self.way_out, self.errno)
