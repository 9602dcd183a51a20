# needs: bash
# Bash's own behaviours: traps, jobs, substitutions, here documents, coprocesses, limits.
cat > script <<'END'
set -u
trap 'echo trapped' USR1
trap 'echo left $?' EXIT
for i in 1 2 3; do kill -USR1 $$; done
x=$(echo substituted | tr a-z A-Z); echo "$x ${PIPESTATUS[*]}"
(exit 3); echo $?
(kill -TERM $BASHPID); echo $?
sleep 0.05 & wait $!; echo waited $?
./nonexistent; echo $?
read -r -t 0.05 line < <(sleep 0.3); echo $(($? > 128))
for ((i = 0; i < ${WHOLE:+1}300; i++)); do echo $i > file; done; cat file
exec 7<file; cat <&7; exec 7<&-
coproc { while read -r line; do echo "back: $line"; done; }
echo there >&"${COPROC[1]}"; read -r answer <&"${COPROC[0]}"; echo "$answer"
eval "exec ${COPROC[1]}>&-"; wait
cat <<HERE | sort | uniq -c
b
a
b
HERE
diff <(seq 5) <(seq 6); echo $?
yes | head -2; echo "${PIPESTATUS[*]}"
for i in {1..20}; do (echo $i) & done | sort -n | tail -1
wait
ulimit -n 64; ulimit -n
printf '%s\n' *
test -t 0; echo $?
exec bash -c 'echo executed; exit 9'
END
bash script
