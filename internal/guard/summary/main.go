// Command summary prints gocmd.Summary of a file with the output of go test -json, and fails with its error.
package main

import (
	"fmt"
	"os"

	"github.com/serviceplane/serviceplane/internal/guard/gocmd"
)

func main() {
	text, err := os.ReadFile(os.Args[1])
	if err == nil {
		var summary string
		summary, err = gocmd.Summary(text, os.Getenv("SERVICEPLANE_REQUIRE_KERNEL") == "1")
		fmt.Print(summary)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
