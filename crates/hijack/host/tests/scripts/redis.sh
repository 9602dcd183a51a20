# needs: redis-server redis-cli redis-benchmark
# A server under its benchmark, its snapshots by forked children, and its end.
redis-server --bind 127.0.0.1 --port "$PORT" --dir . --logfile log --save '' --io-threads 2 --appendonly yes > /dev/null &
server=$!
cli() { redis-cli -p "$PORT" "$@"; }
i=0; until [ "$(cli ping 2> /dev/null)" = PONG ] || [ $i -gt 200 ]; do sleep 0.05; i=$((i + 1)); done
redis-benchmark -p "$PORT" -n "${WHOLE:+3}1000" -c 10 -t set,get,lpush,mset -q > measured; tr '\r' '\n' < measured | grep -c 'requests per second'
redis-benchmark -p "$PORT" -n "${WHOLE:+3}1000" -P 16 --threads 2 -q -t incr > /dev/null
cli set key value; cli get key; cli eval 'return redis.call("incr", KEYS[1])' 1 counted
cli save; cli bgsave > /dev/null; cli bgrewriteaof > /dev/null
i=0; while [ $i -lt 100 ] && cli info persistence | grep -q 'in_progress:1'; do sleep 0.05; i=$((i + 1)); done
cli info persistence | grep -E 'last_(bgsave|bgrewrite)_status|aof_last_write' | tr -d '\r'
cli dbsize; cli debug sleep 0; kill $server; wait $server; echo $?
grep -c 'ready to exit' log; rm -rf appendonlydir dump.rdb log measured
