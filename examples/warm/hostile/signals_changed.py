# expect: exit 0
"""Takes over all signals, blocks them, and leaves some pending."""
import faulthandler
import os
import signal

for number in signal.valid_signals():
    try:
        signal.signal(number, signal.SIG_IGN if number % 2 else lambda *_: None)
    except (OSError, ValueError):
        pass
faulthandler.enable()
faulthandler.register(signal.SIGUSR2)
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGRTMIN + 5):
    os.kill(os.getpid(), number)
print(len(signal.sigpending()), "pending")
