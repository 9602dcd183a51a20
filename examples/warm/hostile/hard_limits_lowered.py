# expect: exit 0
# worker: replaced
"""Lowers a hard limit, which only a privileged process can raise again."""
import resource

resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
print(resource.getrlimit(resource.RLIMIT_NOFILE))
