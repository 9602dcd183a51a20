# needs: go
# Goroutines, preemption by signals, the runtime's own network poller, programs that it starts, faults that become panics;
# whole, its compiler and linker too.
"$CACHE/go-program"; echo $?
if [ -n "$WHOLE" ]; then
    export GOCACHE="$PWD/build" GOFLAGS=-mod=mod CGO_ENABLED=0 GOTOOLCHAIN=local GO111MODULE=off GOPATH="$PWD/path"
    go build -o program "$PROGRAMS/program.go" && ./program; echo $?
    # Counters that the compiler keeps for its authors, with the time.
    rm -rf build path program "$HOME/.config"
fi
