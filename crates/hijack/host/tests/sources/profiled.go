// Spends its time in two places, and has itself profiled: computing, and in system calls.
package main

import (
	"fmt"
	"os"
	"runtime/pprof"
	"syscall"
)

var sum uint64

//go:noinline
func spins() {
	for i := uint64(0); i < 600_000_000; i++ {
		sum = sum*31 + i
	}
}

//go:noinline
func calls() {
	for i := 0; i < 3_000_000; i++ {
		sum += uint64(syscall.Getppid())
	}
}

func main() {
	file, err := os.Create(os.Args[1])
	if err == nil {
		err = pprof.StartCPUProfile(file)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	spins()
	calls()
	pprof.StopCPUProfile()
}
