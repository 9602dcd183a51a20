export GOCACHE="$CACHE/go-build" GOFLAGS=-mod=mod CGO_ENABLED=0 GOTOOLCHAIN=local GO111MODULE=off GOPATH="$CACHE/go-path"
go build -o "$CACHE/go-program" "$PROGRAMS/program.go"
