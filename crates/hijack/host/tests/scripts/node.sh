# needs: node
# Its pool of threads, workers, a server and its clients, children, signals.
node "$PROGRAMS/program.js"; echo $?
