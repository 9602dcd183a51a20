package main

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"
)

func main() {
	var group sync.WaitGroup
	var lock sync.Mutex
	done := 0
	for i := 0; i < 50; i++ {
		group.Add(1)
		go func() {
			defer group.Done()
			for j := 0; j < 200; j++ {
				os.Getppid()
				file, err := os.Open("/dev/null")
				if err != nil {
					fmt.Println(err)
				}
				file.Close()
				if j%50 == 0 {
					time.Sleep(time.Microsecond)
				}
				lock.Lock()
				done++
				lock.Unlock()
			}
		}()
	}
	group.Wait()
	fmt.Println(done)
	for i := 0; i < 5; i++ {
		output, err := exec.Command("echo", "hi").Output()
		fmt.Printf("%s%v\n", output, err)
	}
	_, err := exec.Command("/nonexistent").Output()
	fmt.Println(err)
	signals := make(chan os.Signal, 1)
	signal.Notify(signals, syscall.SIGUSR1)
	syscall.Kill(os.Getpid(), syscall.SIGUSR1)
	fmt.Println(<-signals)
	x := 0
	go func() {
		for {
			x++
		}
	}()
	for i := 0; i < 20; i++ {
		runtime.GC()
		time.Sleep(time.Millisecond)
	}
	defer func() { fmt.Println(recover()) }()
	var nowhere *int
	*nowhere = 1
}
