# needs: java javac
# Threads, compiled code, sockets, children, and the faults that the machine turns into exceptions.
for way in -Xint -XX:TieredStopAtLevel=1 ${WHOLE:+-XX:+UseParallelGC} ${WHOLE:+-XX:+UseZGC}; do
    java -XX:-UsePerfData "$way" -cp "$CACHE" Program; echo $?
done
