// Words counts the lines of a file that all processes which count the same bytes have in memory once.
package main

import (
	"bytes"
	"fmt"
	"os"

	"orrery.example/words/shared"
)

func count(path string) error {
	object, err := shared.Open(path)
	if err != nil {
		return err
	}
	defer object.Close()
	fmt.Printf("%d lines, object %s\n", bytes.Count(object.Bytes(), []byte("\n")), object.Name())
	return nil
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: words FILE")
		os.Exit(2)
	}
	if err := count(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, "words:", err)
		os.Exit(1)
	}
}
