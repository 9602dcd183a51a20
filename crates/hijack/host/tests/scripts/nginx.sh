# needs: nginx wrk curl
# A server with workers under load, with its configuration read anew and its workers replaced, and its end.
mkdir -p www && head -c 5000 /dev/zero > www/x && chmod -R a+rX .
cat > nginx.conf <<END
daemon off; worker_processes 2; pid $PWD/pid; error_log $PWD/errors; $([ "$(id -u)" = 0 ] && echo user root\;)
events { worker_connections 256; }
http { access_log $PWD/log; client_body_temp_path b; proxy_temp_path p; fastcgi_temp_path f; uwsgi_temp_path u; scgi_temp_path s;
  sendfile on; aio threads; gzip on; gzip_types *;
  server { listen 127.0.0.1:$PORT; root $PWD/www; location /back { proxy_pass http://127.0.0.1:$PORT/x; } } }
END
nginx -p . -c "$PWD/nginx.conf" & server=$!
get() { curl -s "$@" "http://127.0.0.1:$PORT/$path"; }
path=x; i=0; until [ "$(get | wc -c)" = 5000 ] || [ $i -gt 200 ]; do sleep 0.05; i=$((i + 1)); done
wrk -t2 -c8 -d"${WHOLE:+1}1s" "http://127.0.0.1:$PORT/x" > measured 2>&1
grep -c 'Requests/sec' measured; grep -E 'Non-2xx|Socket errors' measured
path=back; get | cksum; path=x; get --compressed | cksum; path=nowhere; get | head -1; get -I | head -1
kill -HUP "$(cat pid)"; sleep 0.3; path=x; get | wc -c
kill -USR1 "$(cat pid)"; sleep 0.1; kill -QUIT "$(cat pid)"; wait $server; echo $?
grep -cE 'emerg|alert|crit' errors; rm -rf b p f u s log errors measured pid nginx.conf
