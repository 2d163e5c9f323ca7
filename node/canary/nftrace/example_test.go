package nftrace_test

import (
	"fmt"

	"github.com/serviceplane/serviceplane/node/canary"
	"github.com/serviceplane/serviceplane/node/canary/nftrace"
)

// When connections of the canary fail, its status and its log name the rule that stops them.
func ExampleExplain() {
	_, err := canary.New(canary.Options{Explain: nftrace.Explain("")})
	fmt.Println(err)
	// Output: <nil>
}
