# needs: busybox
# A large static program: its shell, and what it has in place of others.
busybox sh -c '
trap "echo trapped" USR1; kill -USR1 $$
for i in $(busybox seq 200); do echo $i; done | busybox sort -rn | busybox head -3
mkdir -p d && busybox tar c /etc/passwd 2> /dev/null | busybox gzip | busybox gunzip | busybox tar t
echo text > d/f; busybox sed -i s/e/i/ d/f; busybox cat d/f; busybox find d; busybox stat -c %s d/f
busybox awk "BEGIN { print 2^10 }"; busybox ps > /dev/null; (exit 4)'
