# expect: exit 0
"""Changes directory, mask and soft limits."""
import os
import resource

os.chdir("/tmp")
os.umask(0o777)
for name in ("RLIMIT_NOFILE", "RLIMIT_STACK", "RLIMIT_CPU", "RLIMIT_FSIZE", "RLIMIT_NPROC", "RLIMIT_CORE"):
    limit = getattr(resource, name)
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (20 if soft < 0 or soft > 20 else soft // 2, hard))
print(os.getcwd())
