"""Start other programs: capture, pipe, fail, time out."""

import shlex
import subprocess
import sys

print(subprocess.run(["echo", "hello"], capture_output=True, text=True).stdout, end="")
first = subprocess.Popen(["printf", "%s\\n", "pear", "apple", "fig"], stdout=subprocess.PIPE)
second = subprocess.Popen(["sort"], stdin=first.stdout, stdout=subprocess.PIPE, text=True)
first.stdout.close()
print(second.communicate()[0].split(), first.wait(), second.returncode)
sys.stdout.flush()
subprocess.run("echo straight to your terminal", shell=True, check=True)
try:
    subprocess.run(["false"], check=True)
except subprocess.CalledProcessError as error:
    print(error)
try:
    subprocess.run(["sleep", "10"], timeout=0.05)
except subprocess.TimeoutExpired as error:
    print(shlex.join(error.cmd), "took too long")
killed = subprocess.Popen(["sleep", "10"])
killed.terminate()
print("terminated:", killed.wait())
