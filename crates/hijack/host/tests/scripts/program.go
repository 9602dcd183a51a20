package main

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"sync"
	"syscall"
	"time"
)

// Clients and a server that meet in the poller; a client that is given up.
func network() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		fmt.Println(err)
		return
	}
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			go func() {
				defer connection.Close()
				line, _ := bufio.NewReader(connection).ReadString('\n')
				fmt.Fprintf(connection, "back: %s", line)
			}()
		}
	}()
	answers := make(chan string)
	for i := 0; i < 20; i++ {
		go func() {
			connection, err := net.Dial("tcp", listener.Addr().String())
			if err != nil {
				answers <- err.Error()
				return
			}
			defer connection.Close()
			fmt.Fprintln(connection, "there")
			line, _ := bufio.NewReader(connection).ReadString('\n')
			answers <- line
		}()
	}
	same := 0
	for i := 0; i < 20; i++ {
		if <-answers == "back: there\n" {
			same++
		}
	}
	fmt.Println(same)
	silent, _ := net.Dial("tcp", listener.Addr().String())
	silent.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
	_, err = silent.Read(make([]byte, 1))
	timeout, is := err.(net.Error)
	fmt.Println(is && timeout.Timeout())
	silent.Close()
	listener.Close()
	ending, stop := context.WithTimeout(context.Background(), 30*time.Millisecond)
	defer stop()
	fmt.Println(exec.CommandContext(ending, "sleep", "60").Run())
}

func main() {
	network()
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
