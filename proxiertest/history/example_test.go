package history_test

import (
	"fmt"

	"github.com/serviceplane/serviceplane/proxiertest/history"
)

// The same seed makes the same steps; Run executes them.
func ExampleNew() {
	steps := history.New(7, 30)
	fmt.Println(steps[0].Kind, "first,", steps[len(steps)-1].Kind, "last")
	// Output: set node first, converge last
}
