# needs: ls stat chmod mkfifo split tac factor
# What coreutils do to files, pipes, links, times and signals.
umask 022
mkdir -p a/b/c && cd a
seq 2000 > n && split -l 300 n part. && ls && cat part.* | cmp - n
sort -R --random-source=n n | sort -n | sha256sum
tac n | head -1; shuf -i 1-100 --random-source=n | wc -l; factor 1234567890123457
ln n hard; ln -s n soft; ln -s nowhere broken; stat -c '%n %s %h %a %F' n hard soft broken
cp -a . ../copy && ls -lR --time-style=+ ../copy | sed 's/^total.*//' | awk '{print $1, $2, $5, $NF}'
mkfifo -m 600 pipe; (seq 3 > pipe &) ; cat pipe
touch -d '2001-02-03 04:05:06 UTC' old; TZ=UTC stat -c %y old; test n -nt old && echo newer
chmod 0 old; mv old b/c; rmdir b; echo $?; rm -r b; ls
dd if=n of=m bs=100 count=7 skip=2 seek=1 status=noxfer 2> said; cat said; rm said; sha256sum m
truncate -s 1M sparse; du --apparent-size -k sparse; cmp sparse /dev/zero -n 1000000; sha1sum sparse
timeout 0.1 sleep 5; echo $?
timeout -s KILL 0.1 sh -c 'sleep 5'; echo $?
env -i X=y env; nice -n 5 nice; nohup true 2> /dev/null; echo $?
tee one two < n | tail -1; comm one two | wc -l; paste one two | tail -1; join one two | wc -l
: > grows; (sleep 0.1; echo late) > grows & tail -n +1 -f --pid=$! grows 2> /dev/null; wait
stdbuf -o0 echo unbuffered; echo x | xargs -n1 -P2 echo; find . -type f | LC_ALL=C sort | xargs md5sum
df . > /dev/null; id -u > /dev/null; uname -s; pwd -P | wc -l; mktemp -u | wc -l
i=0; while [ $i -lt ${WHOLE:+5}20 ]; do cp n x$i && mv x$i y && rm y; i=$((i + 1)); done; ls; rm -rf ../copy sparse
ls /nonexistent; cat .; rm nothing
