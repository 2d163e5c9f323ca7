package spctl_test

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/serviceplane/serviceplane/node/nodeproxy/spctl"
)

// A program mounts the command among its own. Here it asks a proxy that does not run.
func ExampleNew() {
	address := "http://127.0.0.1:1/debug/services"
	root := &cobra.Command{Use: "agent", SilenceErrors: true, SilenceUsage: true}
	root.AddCommand(spctl.New(spctl.Options{Use: "proxy", Address: address}))
	root.SetOut(os.Stdout)

	root.SetArgs([]string{"proxy", "services", "--no-endpoints"})
	err := root.ExecuteContext(context.Background())
	fmt.Println(spctl.ExitStatus(err))
	// Output: 2
}
