# expect: timeout
"""Never ends."""
print("on and on", flush=True)
while True:
    pass
