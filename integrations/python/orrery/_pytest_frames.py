"""What pytest and its runner send each other: a length, and a value that `marshal` can hold."""

from __future__ import annotations

import marshal
import socket
import struct
import sys
import warnings
from typing import Any, Optional

_LENGTH = struct.Struct("=Q")
_PLAIN = (str, int, float, bool, bytes, type(None))


def send(connection: socket.socket, value: Any) -> None:
    """Sends a value; what is no plain data in it becomes its `repr`."""
    try:
        body = marshal.dumps(value)
    except ValueError:
        body = marshal.dumps(plain(value))
    connection.sendall(_LENGTH.pack(len(body)) + body)


def receive(connection: socket.socket) -> Any:
    """Receives a value; raises `EOFError` where the other side has ended."""
    return marshal.loads(_exactly(connection, _LENGTH.unpack(_exactly(connection, _LENGTH.size))[0]))


def _exactly(connection: socket.socket, length: int) -> bytearray:
    received = bytearray()
    while len(received) < length:
        try:
            part = connection.recv(length - len(received))
        except ConnectionResetError:
            part = b""
        if not part:
            raise EOFError
        received += part
    return received


def plain(value: Any) -> Any:
    """Returns the value with all that `marshal` refuses replaced."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, (list, set, frozenset)):
        return [plain(item) for item in value]
    for kind in (str, bool, int, float, bytes):
        if isinstance(value, kind):
            return kind(value)
    return repr(value)


def warning_to_plain(warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any) -> dict[str, Any]:
    category = warning_message.category
    return {
        "text": str(warning_message.message),
        "category": (category.__module__, category.__qualname__),
        "filename": warning_message.filename,
        "lineno": warning_message.lineno,
        "when": when,
        "nodeid": nodeid,
        "location": location,
    }


def warning_from_plain(plain_warning: dict[str, Any]) -> warnings.WarningMessage:
    """Makes the warning again; of a class that this process does not have, it is a `Warning` that names it."""
    module, name = plain_warning["category"]
    text = plain_warning["text"]
    category: Any = getattr(sys.modules.get(module), name, None)
    message: Optional[Warning] = None
    if isinstance(category, type) and issubclass(category, Warning):
        try:
            message = category(text)
        except Exception:
            message = None
    if message is None or str(message) != text:
        category, message = Warning, Warning(f"{module}.{name}: {text}")
    return warnings.WarningMessage(message, category, plain_warning["filename"], plain_warning["lineno"])
