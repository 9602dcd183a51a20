# needs: java javac
# A hundred threads that start programs at once: by posix_spawn, as Java does of itself; whole, by vfork, too.
programs=1
[ -n "$WHOLE" ] && programs=5
for way in POSIX_SPAWN ${WHOLE:+VFORK}; do
    java -XX:-UsePerfData -XX:TieredStopAtLevel=1 -Djdk.lang.Process.launchMechanism=$way -cp "$CACHE" Pool $programs; echo $?
done
